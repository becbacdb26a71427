//! The event structure against others on one workload: `n` sources, each with one next event; the earliest one happens
//! and sets its source's next, seven times in ten about 1 us, else 0.1 us or 8 us later.
//!
//! The engine's sources are ranks, not tasks, and a change of rates moves the next event of a rank that has none at
//! present. The tree does that in place; a heap or a calendar would leave a stale entry behind each time. On this
//! workload, where nothing ever moves, it is the slowest of the three; in a run of the engine it takes 2 % of the time.

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use std::cmp::Reverse;
use std::collections::{BinaryHeap, VecDeque};
use std::hint::black_box;
use std::time::Duration;
use tilewire_sim::tree::Tree;

const STEPS: u64 = 200_000;

/// Time until the source's next event, ps.
fn gap(state: &mut u64) -> u64 {
    *state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
    let draw = *state >> 33;
    let mean = match draw % 20 {
        0..14 => 1_000_000,
        14..19 => 100_000,
        _ => 8_000_000,
    };
    mean / 2 + (draw / 20) % mean
}

fn winner_tree(tree: &mut Tree, state: &mut u64) -> u64 {
    let (mut due, mut done, mut sum) = (Vec::new(), 0, 0_u64);
    while done < STEPS {
        let now = tree.min();
        due.clear();
        tree.ranks_at(now, &mut due);
        for &source in &due {
            sum = sum.wrapping_add(u64::from(source));
            tree.set(source as usize, now + gap(state));
            done += 1;
        }
    }
    sum
}

fn binary_heap(heap: &mut BinaryHeap<Reverse<(u64, u32)>>, state: &mut u64) -> u64 {
    let mut sum = 0_u64;
    for _ in 0..STEPS {
        let Some(mut first) = heap.peek_mut() else { break };
        let Reverse((now, source)) = *first;
        sum = sum.wrapping_add(u64::from(source));
        *first = Reverse((now + gap(state), source));
    }
    sum
}

/// Days of equal width; a day is sorted when it begins.
struct Calendar {
    days: Vec<Vec<(u64, u32)>>,
    width: u64,
    today: u64,
    open: VecDeque<(u64, u32)>,
}

impl Calendar {
    /// About 32 events a day at a mean gap of 1.1 us.
    fn new(sources: usize) -> Self {
        let width = (32 * 1_100_000 / sources as u64).max(1);
        let days = (20_000_000 / width + 2).next_power_of_two() as usize;
        Self { days: vec![Vec::new(); days], width, today: 0, open: VecDeque::new() }
    }

    fn push(&mut self, time: u64, source: u32) {
        let day = time / self.width;
        if day == self.today {
            let at = self.open.partition_point(|event| *event < (time, source));
            self.open.insert(at, (time, source));
        } else {
            let days = self.days.len();
            self.days[day as usize % days].push((time, source));
        }
    }

    fn pop(&mut self) -> (u64, u32) {
        loop {
            if let Some(event) = self.open.pop_front() {
                return event;
            }
            self.today += 1;
            // No gap is longer than the calendar: all events of the page are of this day.
            let at = self.today as usize % self.days.len();
            self.days[at].sort_unstable();
            self.open.extend(self.days[at].drain(..));
        }
    }
}

fn calendar(calendar: &mut Calendar, state: &mut u64) -> u64 {
    let mut sum = 0_u64;
    for _ in 0..STEPS {
        let (now, source) = calendar.pop();
        sum = sum.wrapping_add(u64::from(source));
        calendar.push(now + gap(state), source);
    }
    sum
}

fn queues(c: &mut Criterion) {
    let mut group = c.benchmark_group("next_event");
    group.throughput(Throughput::Elements(STEPS));
    for n in [16_usize, 1_000, 8_192, 100_000, 1_000_000] {
        let mut state = 1;
        let mut tree = Tree::new(n);
        (0..n).for_each(|source| tree.set(source, gap(&mut state)));
        group.bench_with_input(BenchmarkId::new("winner_tree", n), &n, |b, _| {
            b.iter(|| black_box(winner_tree(&mut tree, &mut state)));
        });
        let mut heap: BinaryHeap<_> = (0..n as u32).map(|source| Reverse((gap(&mut state), source))).collect();
        group.bench_with_input(BenchmarkId::new("binary_heap", n), &n, |b, _| {
            b.iter(|| black_box(binary_heap(&mut heap, &mut state)));
        });
        let mut days = Calendar::new(n);
        (0..n as u32).for_each(|source| days.push(gap(&mut state), source));
        group.bench_with_input(BenchmarkId::new("calendar", n), &n, |b, _| {
            b.iter(|| black_box(calendar(&mut days, &mut state)));
        });
    }
    group.finish();
}

criterion_group! {
    name = benches;
    config = Criterion::default().sample_size(10).measurement_time(Duration::from_secs(2));
    targets = queues
}
criterion_main!(benches);
