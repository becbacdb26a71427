//! A run that cannot end says who waits for what.

use crate::support::*;
use tilewire_kernels::schedule::{At, Claim};
use tilewire_kernels::{Fabric, RoleKind};
use tilewire_sim::SimError;

fn blocked(claim: Claim) -> (f64, Vec<tilewire_kernels::Blocked>) {
    // Flag 7 gets 1 of 2; the second task behind it never starts.
    let roles = vec![compute(), role(RoleKind::IntraComm, claim)];
    let toy = Toy::node(1, roles).tasks(|_, _, role| {
        if role == 0 {
            vec![copy(At::ME, At::ME, 50_000).signal(signal(At::ME, 7))]
        } else {
            let two = tilewire_kernels::schedule::Wait { at_least: 2, ..wait(7) };
            vec![sync(), copy(At::ME, At::ME, 50_000).wait(two)]
        }
    });
    match try_simulate(&toy, &round_machine(Fabric::IbRc), split(1, 1, 0, 0)) {
        Err(SimError::Stuck { at_us, blocked }) => (at_us, blocked),
        other => panic!("expected a stuck run, got {other:?}"),
    }
}

#[test]
fn names_the_cta_the_task_and_the_flag() {
    for claim in [Claim::Strided, Claim::Ticket, Claim::Ready { window: 8 }] {
        let (at_us, blocked) = blocked(claim);
        assert!((at_us - 5.5).abs() < 1e-9, "the add becomes visible at 5.5 us: {at_us}");
        let [blocked] = &blocked[..] else { panic!("{claim:?}: one CTA waits, got {blocked:?}") };
        assert_eq!((blocked.role, blocked.cta, blocked.task), (RoleKind::IntraComm, 0, 1), "{claim:?}");
        assert_eq!((blocked.slot, blocked.have), (7, 1), "{claim:?}");
        assert_eq!(blocked.need, 2, "{claim:?}");
    }
}
