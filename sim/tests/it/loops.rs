//! What a benchmark's loop shows: launches on a cold card, then on a warm one.

use crate::support::*;
use tilewire_kernels::OptionSet;
use tilewire_sim::{Clock, Config, Loop, Protocol, Simulation};

/// A simulation under a protocol, on a card that stays cold for 80 ms under load.
fn cold_for_80_ms(protocol: Protocol) -> Simulation {
    let machine = with(shipped_machine("h200-efa"), &[("gpu.cold_ms", 80.0)]);
    let schedule = Toy::node(1, vec![compute()]).tasks(|_, _, _| Vec::new());
    Simulation::new(&schedule, &machine, &Config { protocol, ..full() }).expect("compiles")
}

/// The cold share of its launches of so many ms in thousandths.
fn share(protocol: Protocol, ms: u64) -> u32 {
    let simulation = cold_for_80_ms(protocol);
    (simulation.cold_share(ms * 1000 * US) * 1000.0).round() as u32
}

fn looped(warm_up: u32, launches: u32, median: bool) -> Protocol {
    let timed = Loop { warm_up, launches, median };
    Protocol::Published { stale_arrivals: true, isolated: false, waits_for_host: true, timed }
}

#[test]
fn the_first_launches_of_a_loop_are_cold() {
    // Eight launches of 10 ms, sixteen of 5 ms.
    let mean = looped(0, 10, false);
    assert_eq!([1, 5, 8, 10, 20, 160].map(|ms| share(mean, ms)), [1000, 1000, 1000, 800, 400, 50]);
    let behind = looped(3, 10, false);
    assert_eq!([5, 10, 20, 40].map(|ms| share(behind, ms)), [1000, 500, 100, 0]);
    // The sixth of ten counts: six of them, or the warm-up and six.
    let median = looped(0, 10, true);
    assert_eq!([10, 14, 16, 20].map(|ms| share(median, ms)), [1000, 714, 0, 0]);
    assert_eq!([8, 10, 16].map(|ms| share(looped(3, 10, true), ms)), [1000, 0, 0]);
    assert_eq!([8, 80, 160].map(|ms| share(ISOLATED, ms)), [1000, 1000, 500]);
    assert_eq!(share(Protocol::Fair, 1), 0);
}

/// All of ten launches of 8 ms are cold; of 10 ms eight are, and behind twenty launches that nobody times none.
#[test]
fn a_loop_shows_the_mean_and_asks_for_warm_launches_where_there_are_some() {
    let shown = |warm_up, cold_ms: u64, later: Result<u64, &'static str>| {
        let later_ps = || later.map(|ms| ms * 1000 * US);
        cold_for_80_ms(looped(warm_up, 10, false)).loop_ps(cold_ms * 1000 * US, later_ps)
    };
    assert_eq!(shown(0, 8, Err("nobody asks")), Ok(8000 * US));
    assert_eq!(shown(0, 10, Ok(15)), Ok(11_000 * US));
    assert_eq!(shown(20, 10, Ok(15)), Ok(15_000 * US));
    assert_eq!(shown(0, 10, Err("stuck")), Err("stuck"));
}

#[test]
fn a_mean_over_launches_loses_no_time_of_a_cta() {
    let machine = shipped_machine("h200-efa");
    for case in kernels(OptionSet::Published, cluster(2, 4), machine.fabric, 2) {
        let of = |clock| {
            let config = Config { protocol: LOOPED, clock, ..Config::default() };
            let simulation = Simulation::new(&case.schedule, &machine, &config).expect("compiles");
            simulation.predict(&case.usual_split()).expect("runs")
        };
        let (cold, later) = (of(Clock::Cold), of(Clock::Sustained));
        assert!(cold.time_us <= later.time_us, "{}", case.name);
        let mean = cold.clone().averaged(&later, 0.25);
        let close = |a: f64, b: f64| (a - b).abs() <= 1e-9 * b.abs().max(1.0);
        assert!(close(mean.time_us, 0.25 * cold.time_us + 0.75 * later.time_us), "{}", case.name);
        assert!(close(mean.tflops_per_gpu * mean.time_us, later.tflops_per_gpu * later.time_us), "{}", case.name);
        for role in &mean.roles {
            let sum = role.busy_us + role.wait_us + role.idle_us;
            assert!(close(sum, f64::from(role.ctas) * mean.time_us), "{}: {role:?} of {}", case.name, mean.time_us);
        }
        let waited: f64 = mean.waits.iter().map(|wait| wait.us).sum();
        let of_both = |waits: &[tilewire_sim::WaitReport]| waits.iter().map(|wait| wait.us).sum::<f64>();
        assert!(close(waited, 0.25 * of_both(&cold.waits) + 0.75 * of_both(&later.waits)), "{}", case.name);
        assert!(close(mean.waits.iter().map(|wait| wait.share).sum(), 1.0), "{}", case.name);
        assert!(mean.waits.windows(2).all(|two| two[0].us >= two[1].us), "{}", case.name);
    }
}
