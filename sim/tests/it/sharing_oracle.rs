//! Lazy sharing per class against a slow and obvious solver: every flow on its own, every rate again at every event.

use crate::support::Random;
use tilewire_sim::share::{NEVER, Sharing};

#[derive(Clone)]
struct Flow {
    start: u64,
    class: usize,
    work: u64,
}

struct Network {
    /// Capacity and base demand.
    resources: Vec<(u64, u64)>,
    /// (resource, bytes/s at full speed) of each class.
    classes: Vec<Vec<(u32, u64)>>,
    flows: Vec<Flow>,
}

fn draw(seed: u64) -> Network {
    let mut random = Random(seed);
    let mut within = |low, high| random.within(low, high);
    let resources: Vec<(u64, u64)> = (0..within(1, 6))
        .map(|_| {
            let capacity = within(1_000, 2_000_000_000_000);
            (capacity, if within(0, 3) == 0 { within(0, capacity / 2) } else { 0 })
        })
        .collect();
    let classes: Vec<Vec<(u32, u64)>> = (0..within(1, 8))
        .map(|_| {
            (0..resources.len() as u32)
                .filter_map(|r| {
                    let widest = resources[r as usize].0;
                    (within(0, 1) == 0).then(|| (r, within(1, widest.max(2))))
                })
                .collect()
        })
        .collect();
    let flows = draw_flows(&mut random, classes.len(), (1, 40));
    Network { resources, classes, flows }
}

/// Flows of these classes, at least and at most so many, by their start.
fn draw_flows(random: &mut Random, classes: usize, (fewest, most): (u64, u64)) -> Vec<Flow> {
    let mut within = |low, high| random.within(low, high);
    let horizon = 10_u64.pow(within(3, 9) as u32);
    let mut flows: Vec<Flow> = (0..within(fewest, most))
        .map(|_| Flow {
            // Simultaneous starts and equal works are the rule in the simulator.
            start: within(0, horizon) / 1_000 * within(0, 1) * 1_000,
            class: within(0, classes as u64 - 1) as usize,
            work: [within(1, horizon), 1_000, horizon][within(0, 2) as usize],
        })
        .collect();
    flows.sort_by_key(|flow| flow.start);
    flows
}

/// More resources than a flow crosses, in chains or at random, most of them short of capacity: a change reaches some and
/// not others.
fn draw_wide(seed: u64) -> Network {
    let mut random = Random(seed);
    let mut within = |low, high| random.within(low, high);
    let capacity = 10_u64.pow(within(1, 9) as u32);
    let resources: Vec<(u64, u64)> = (0..within(8, 40))
        .map(|_| {
            let capacity = within(capacity, 5 * capacity);
            (capacity, if within(0, 7) == 0 { within(0, capacity / 2) } else { 0 })
        })
        .collect();
    let (chained, resource_count) = (within(0, 1) == 0, resources.len() as u64);
    let classes: Vec<Vec<(u32, u64)>> = (0..within(20, 80))
        .map(|_| {
            let (crossed, first) = (within(1, 4), within(0, resource_count - 1));
            // Equal demands are the rule in the simulator; the smallest ones let rounding decide.
            let demand = within(1, 4) * capacity / 8 + within(0, 2);
            let mut demands: Vec<(u32, u64)> = (0..crossed)
                .map(|i| if chained { (first + i) % resource_count } else { within(0, resource_count - 1) })
                .map(|r| (r as u32, demand.max(1)))
                .collect();
            demands.sort_unstable();
            demands.dedup_by_key(|d| d.0);
            demands
        })
        .collect();
    let flows = draw_flows(&mut random, classes.len(), (40, 200));
    Network { resources, classes, flows }
}

/// Ends of all flows, by the definition: at every event, all rates anew, the lowest level first.
fn slow(network: &Network) -> Vec<u64> {
    let mut left: Vec<u128> = network.flows.iter().map(|flow| u128::from(flow.work) << 32).collect();
    let mut ends = vec![NEVER; network.flows.len()];
    let mut now = 0;
    loop {
        let active: Vec<usize> =
            (0..left.len()).filter(|&f| network.flows[f].start <= now && ends[f] == NEVER).collect();
        let thetas = slow_thetas(network, &active);
        let mut next = network.flows.iter().map(|flow| flow.start).filter(|&start| start > now).min().unwrap_or(NEVER);
        for (&f, &theta) in active.iter().zip(&thetas) {
            if theta > 0 {
                next = next.min(now + left[f].div_ceil(theta) as u64);
            }
        }
        if next == NEVER {
            return ends;
        }
        for (&f, &theta) in active.iter().zip(&thetas) {
            left[f] = left[f].saturating_sub(theta * u128::from(next - now));
            if left[f] == 0 {
                ends[f] = next;
            }
        }
        now = next;
    }
}

fn slow_thetas(network: &Network, active: &[usize]) -> Vec<u128> {
    let mut thetas: Vec<Option<u128>> = vec![None; active.len()];
    loop {
        // What each resource can still give each flow that has no rate yet; the base slows down with the last of them.
        let mut levels = Vec::new();
        for (r, &(capacity, base)) in network.resources.iter().enumerate() {
            let mut room = u128::from(capacity) << 32;
            let (mut open, mut waiting) = (u128::from(base), false);
            for (&f, &theta) in active.iter().zip(&thetas) {
                for &(_, rate) in network.classes[network.flows[f].class].iter().filter(|d| d.0 == r as u32) {
                    if let Some(theta) = theta {
                        room -= theta * u128::from(rate);
                    } else {
                        open += u128::from(rate);
                        waiting = true;
                    }
                }
            }
            levels.push(if waiting { room / open } else { u128::MAX });
        }
        let lowest = levels.iter().copied().min().unwrap_or(u128::MAX);
        if lowest >= 1 << 32 {
            return thetas.into_iter().map(|theta| theta.unwrap_or(1 << 32)).collect();
        }
        for (&f, theta) in active.iter().zip(&mut thetas) {
            let demands = &network.classes[network.flows[f].class];
            if theta.is_none() && demands.iter().any(|&(r, _)| levels[r as usize] == lowest) {
                *theta = Some(lowest);
            }
        }
    }
}

/// Ends of all flows by the fast way; nothing may carry more than its capacity on the way.
fn fast(network: &Network, sharing: &mut Sharing) -> Vec<u64> {
    let mut ends = vec![NEVER; network.flows.len()];
    let (mut started, mut ended) = (0, Vec::new());
    loop {
        let due = sharing.next_end(0);
        let now = due.min(network.flows.get(started).map_or(NEVER, |flow| flow.start));
        if now == NEVER {
            return ends;
        }
        sharing.finish(0, now, &mut ended);
        for flows in ended.drain(..) {
            let tag = flows.tag as usize;
            for number in (0..64).filter(|number| flows.set >> number & 1 == 1) {
                assert_eq!(std::mem::replace(&mut ends[64 * tag + number], now), NEVER, "a flow ends once");
            }
        }
        while let Some(flow) = network.flows.get(started).filter(|flow| flow.start == now) {
            sharing.start(flow.class as u32, now, flow.work, started as u32 / 64, 1 << (started % 64));
            started += 1;
        }
        sharing.solve(now, |_| {});
        for (r, &(capacity, _)) in network.resources.iter().enumerate() {
            assert!(sharing.carried(r as u32) <= capacity, "resource {r} at {now}");
        }
    }
}

#[test]
fn equal_on_a_thousand_cases() {
    for (seed, network) in (0..1_000).map(|seed| (seed, draw(seed))).chain((0..400).map(|seed| (seed, draw_wide(seed))))
    {
        let mut sharing = Sharing::new(network.resources.iter().copied());
        for (number, class) in network.classes.iter().enumerate() {
            sharing.add_class(0, !(seed as usize + number).is_multiple_of(4), class.iter().copied());
        }
        let expected = slow(&network);
        assert_eq!(fast(&network, &mut sharing), expected, "seed {seed}");
        sharing.reset();
        assert_eq!(fast(&network, &mut sharing), expected, "seed {seed}, in used memory");
    }
}

#[test]
fn max_min_by_hand() {
    // Flow a crosses both links, b the first, c the second; link 1 takes 10 B/ps-ish units, link 2 takes 30.
    let mut sharing = Sharing::new([(10_000, 0), (30_000, 0)]);
    let a = sharing.add_class(0, false, [(0, 10_000), (1, 10_000)]);
    let b = sharing.add_class(0, false, [(0, 10_000)]);
    let c = sharing.add_class(0, false, [(1, 40_000)]);
    for class in [a, b, c] {
        sharing.start(class, 0, 1_000_000, class, 1);
    }
    sharing.solve(0, |_| {});
    // Link 1 is full at 1/2 for a and b; c gets what is left of link 2: 25,000 of 40,000.
    assert_eq!([a, b, c].map(|class| sharing.theta(class)), [1 << 31, 1 << 31, (25_000 << 32) / 40_000]);
    assert_eq!([0, 1].map(|link| sharing.carried(link)), [10_000, 30_000]);
}

#[test]
fn a_change_that_travels_far() {
    // Flow 0 is held back at link 0, to 0.30 of its speed, and crosses link 1. Flow i is held back at link i + 1, which it
    // shares with the flow before: to 0.36, 0.42 and so on. Flow x takes a little of flow 0 at link 1, so that flow 1 gets
    // more, flow 2 less, to the end of the chain.
    let speed = |i: u64| 300 + 60 * i;
    let mut resources = vec![(300, 0), (580, 0)];
    resources.extend((1..8).map(|i| (speed(i - 1) + speed(i), 0)));
    let mut classes = vec![vec![(0, 1_000), (1, 1_000), (2, 1_000)]];
    classes.extend((1..8).map(|i| vec![(i + 1, 1_000), (i + 2, 1_000)]));
    classes[7].pop();
    // x and three others also cross a link that is not full before y comes.
    let shared = resources.len() as u32;
    resources.extend([(2_400, 0), (200, 0)]);
    classes[3].push((shared, 1_000));
    classes[6].push((shared, 1_000));
    classes.insert(0, vec![(shared, 1_000), (shared + 1, 1_000)]);
    classes.push(vec![(1, 1_000), (shared, 1_000)]);
    classes.push(vec![(shared, 1_000)]);
    let flow = |class: usize| Flow { start: 1_000 * (class as u64).saturating_sub(8), class, work: 1_000_000 };
    let network = Network { resources, classes, flows: (0..11).map(flow).collect() };
    let mut sharing = Sharing::new(network.resources.iter().copied());
    for class in &network.classes {
        sharing.add_class(0, false, class.iter().copied());
    }
    assert_eq!(fast(&network, &mut sharing), slow(&network));
}
