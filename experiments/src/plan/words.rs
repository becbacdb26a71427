//! Words of flags and keys: assignments, roles, splits, kernels.

use super::{Part, Refusal};
use crate::shape;
use std::collections::BTreeSet;
use tilewire_kernels::{Kernel, RoleKind, RoleSplit};

/// `name=value`.
///
/// # Errors
/// The text, when it is not.
fn assignment(text: &str) -> Result<(String, String), Refusal> {
    let form = || Refusal::new(Part::Set, format!("\"{text}\", allowed: NAME=VALUE"));
    let (name, value) = text.split_once('=').ok_or_else(form)?;
    Ok((name.trim().to_owned(), value.trim().to_owned()))
}

/// Several `name=value`, each name once.
///
/// # Errors
/// The first text that is not, or whose name stands before.
pub fn assignments(texts: &[String]) -> Result<Vec<(String, String)>, Refusal> {
    let mut all: Vec<(String, String)> = Vec::with_capacity(texts.len());
    for text in texts {
        let (name, value) = assignment(text)?;
        if let Some((_, before)) = all.iter().find(|(known, _)| *known == name) {
            let problem = format!("{name} twice, as \"{before}\" and as \"{value}\", allowed: each option once");
            return Err(Refusal::new(Part::Set, problem));
        }
        all.push((name, value));
    }
    Ok(all)
}

/// The role with this long or short name.
pub fn role(name: &str) -> Option<RoleKind> {
    RoleKind::ALL.into_iter().find(|kind| name == kind.short() || name == kind.name())
}

/// `compute=112,intra=4,...`; a role left out has 0.
pub fn split(text: &str) -> Result<RoleSplit, Refusal> {
    let refuse = |what: String| {
        let roles = RoleKind::ALL.map(RoleKind::short).join(", ");
        Refusal::new(Part::Split, format!("{what}, allowed: ROLE=CTAS,... of {roles}; or auto; or published"))
    };
    let mut split = RoleSplit::default();
    let mut seen = BTreeSet::new();
    for pair in text.split(',') {
        let (name, ctas) = pair.split_once('=').ok_or_else(|| refuse(format!("\"{pair}\"")))?;
        let kind = role(name.trim()).ok_or_else(|| refuse(format!("role \"{}\"", name.trim())))?;
        if !seen.insert(kind) {
            return Err(refuse(format!("role {} twice", kind.short())));
        }
        let ctas = shape::whole(ctas.trim()).filter(|ctas| *ctas <= 1024);
        split
            .set(kind, ctas.map(|ctas| ctas as u32).ok_or_else(|| refuse(format!("\"{}\" (0 to 1024)", pair.trim())))?);
    }
    Ok(split)
}

/// The kernel with this name.
///
/// # Errors
/// The name, when there is none.
pub fn kernel(name: &str) -> Result<&'static dyn Kernel, Refusal> {
    let known = || tilewire_kernels::KERNELS.iter().map(|kernel| kernel.name()).collect::<Vec<_>>().join(", ");
    tilewire_kernels::kernel(name)
        .ok_or_else(|| Refusal::new(Part::Kernel, format!("no kernel \"{name}\", allowed: {}", known())))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn splits_take_short_and_long_names() {
        // Launches that take all SMs need no CTA of the split.
        assert_eq!(split(&RoleSplit::default().to_string()), Ok(RoleSplit::default()));
        let expected = RoleSplit { compute: 112, intra_comm: 4, inter_send: 8, inter_reduce: 0 };
        assert_eq!(split("compute=112,intra=4,send=8"), Ok(expected));
        assert_eq!(split("compute=112, intra_comm=4, inter_send=8"), Ok(expected));
        for bad in ["", "compute", "compute=-1", "compute=1,compute=2", "computer=1", "compute=4294967296"] {
            assert!(split(bad).is_err(), "{bad}");
        }
    }
}
