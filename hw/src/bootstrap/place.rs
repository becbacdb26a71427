//! Which rank a process is.

use super::BootstrapError;

/// Who and how many.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place {
    /// Rank number.
    pub rank: u32,
    /// Number of ranks.
    pub ranks: u32,
}

impl Place {
    pub(super) fn check(self) -> Result<(), BootstrapError> {
        let Self { rank, ranks } = self;
        if rank < ranks {
            return Ok(());
        }
        Err(BootstrapError::Place(format!(
            "rank {rank} of {ranks}: allowed are 0 to one less than the number of ranks"
        )))
    }
}

/// Variables that launchers set: rank, number of ranks. The first pair that is there counts.
const VARIABLES: [(&str, &str); 4] = [
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("PMI_RANK", "PMI_SIZE"),
    ("SLURM_PROCID", "SLURM_NTASKS"),
    ("RANK", "WORLD_SIZE"),
];

/// The place that a launcher gave this process; none without a launcher. `variable` looks an environment variable up.
///
/// # Errors
/// [`BootstrapError::Place`]: half a pair, or no numbers.
pub fn place(variable: impl Fn(&str) -> Option<String>) -> Result<Option<Place>, BootstrapError> {
    for (rank_name, ranks_name) in VARIABLES {
        let (Some(rank), Some(ranks)) = (variable(rank_name), variable(ranks_name)) else {
            if let Some(name) = [rank_name, ranks_name].into_iter().find(|name| variable(name).is_some()) {
                // Slurm sets the number of ranks in a batch script, which is no rank itself.
                if name != ranks_name {
                    return Err(BootstrapError::Place(format!("{name} is set and {ranks_name} is not")));
                }
            }
            continue;
        };
        let number = |name: &str, text: &str| {
            text.parse::<u32>().map_err(|_| BootstrapError::Place(format!("{name} = {text:?} is no number of a rank")))
        };
        let place = Place { rank: number(rank_name, &rank)?, ranks: number(ranks_name, &ranks)? };
        return place.check().map(|()| Some(place));
    }
    Ok(None)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(set: &[(&str, &str)]) -> Result<Option<Place>, BootstrapError> {
        place(|name| set.iter().find(|(key, _)| *key == name).map(|(_, value)| (*value).to_owned()))
    }

    #[test]
    fn launchers_say_who_we_are() {
        let expected = Some(Place { rank: 2, ranks: 4 });
        for (rank, ranks) in VARIABLES {
            assert_eq!(of(&[(rank, "2"), (ranks, "4")]), Ok(expected));
        }
        assert_eq!(of(&[("SLURM_NTASKS", "4")]), Ok(None), "a batch script is no rank");
        assert_eq!(of(&[]), Ok(None));
    }

    #[test]
    fn nonsense_is_refused_by_name() {
        let texts = [
            of(&[("PMI_RANK", "0")]),
            of(&[("PMI_RANK", "x"), ("PMI_SIZE", "2")]),
            of(&[("PMI_RANK", "2"), ("PMI_SIZE", "2")]),
        ]
        .map(|result| result.expect_err("nonsense").to_string());
        assert_eq!(
            texts,
            [
                "PMI_RANK is set and PMI_SIZE is not",
                "PMI_RANK = \"x\" is no number of a rank",
                "rank 2 of 2: allowed are 0 to one less than the number of ranks"
            ]
        );
    }
}
