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

/// Rank, for processes that this program starts as ranks.
pub const RANK: &str = "TILEWIRE_RANK";
/// Number of ranks, likewise.
pub const RANKS: &str = "TILEWIRE_RANKS";

/// Variables that launchers set: rank, number of ranks. The first pair that is there counts; our own comes first, because
/// a process that starts ranks may itself have been started by a launcher.
const VARIABLES: [(&str, &str); 5] = [
    (RANK, RANKS),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("PMI_RANK", "PMI_SIZE"),
    ("SLURM_PROCID", "SLURM_NTASKS"),
    ("RANK", "WORLD_SIZE"),
];

/// Every variable that could give a process a place.
pub fn launcher_variables() -> impl Iterator<Item = &'static str> {
    VARIABLES.iter().flat_map(|&(rank, ranks)| [rank, ranks])
}

/// What stands in the way of starting ranks from this process: a launcher that started several of it. A batch script of
/// Slurm looks like the first of many, and is alone.
pub fn launched_among_others(variable: impl Fn(&str) -> Option<String>) -> Option<String> {
    let number = |name: &str| variable(name).and_then(|text| text.parse::<u32>().ok());
    VARIABLES.iter().find_map(|&(rank_name, ranks_name)| {
        let (rank, ranks) = (number(rank_name)?, number(ranks_name)?);
        let alone = ranks == 1 || (rank == 0 && rank_name.starts_with("SLURM"));
        (!alone).then(|| format!("{rank_name} = {rank}, {ranks_name} = {ranks}"))
    })
}

/// From now on this process is killed when the one that started it ends; false if that is not `parent` any more.
pub fn end_with(parent: u32) -> bool {
    // Asked for first, so that no end of the parent is missed.
    let asked = rustix::process::set_parent_process_death_signal(Some(rustix::process::Signal::KILL));
    let now = rustix::process::getppid().map(|process| process.as_raw_nonzero().get());
    asked.is_ok() && now == i32::try_from(parent).ok()
}

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
    fn ranks_are_started_by_one_process_of_a_launcher_at_most() {
        let among = |set: &[(&str, &str)]| {
            launched_among_others(|name| set.iter().find(|(key, _)| *key == name).map(|(_, value)| (*value).to_owned()))
        };
        assert_eq!(among(&[]), None);
        assert_eq!(among(&[("SLURM_PROCID", "0"), ("SLURM_NTASKS", "8")]), None, "a batch script");
        assert_eq!(among(&[("PMI_RANK", "0"), ("PMI_SIZE", "1")]), None, "mpirun -n 1");
        let text = "OMPI_COMM_WORLD_RANK = 0, OMPI_COMM_WORLD_SIZE = 4".to_owned();
        assert_eq!(among(&[("OMPI_COMM_WORLD_RANK", "0"), ("OMPI_COMM_WORLD_SIZE", "4")]), Some(text));
        assert!(among(&[("SLURM_PROCID", "3"), ("SLURM_NTASKS", "8")]).is_some());
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
