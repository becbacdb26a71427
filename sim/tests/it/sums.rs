//! Sums: their time by hand on the machine of round numbers, and that of the shipped machine beside what was read on the card.

use crate::support::*;
use tilewire_kernels::Fabric;
use tilewire_kernels::schedule::At;

#[test]
fn a_sum_waits_once_per_round_of_what_it_has_in_flight() {
    let run = |inputs: &[At], outputs: &[At], in_flight| {
        let sum = reduce(inputs, outputs, 50_000, in_flight);
        let toy = Toy::node(2, vec![compute()]).tasks(move |_, _, _| vec![sum.clone()]);
        simulate(&toy, &round_machine(Fabric::IbRc), split(1, 0, 0, 0)).end
    };
    let me = At::ME;
    // 3 us, ten rounds of 10,000 B that take 0.5 us, and three times 50,000 B / 100 GB/s: 3 + 5 + 1.5.
    assert_eq!(run(&[me, me], &[me], 10_000), 9_500 * NS);
    // Twice the inputs, twice the rounds; the output is still one: 3 + 10 + 2.5.
    assert_eq!(run(&[me; 4], &[me], 10_000), 15_500 * NS);
    // More outputs are no more to wait for: 3 + 5 + 2.5.
    assert_eq!(run(&[me, me], &[me; 3], 10_000), 10_500 * NS);
    // At least one round; a neighbour is 1 us further away: 3 + 1.5 + 1.5.
    assert_eq!(run(&[me, At::local(1)], &[me], 1_000_000), 6 * US);
    // In the switch: five rounds of 2 us and 50,000 B / 20 GB/s, then a store / 100 GB/s: 3 + 10 + 2.5 + 0.5.
    assert_eq!(run(&[At::AllLocal], &[me], 10_000), 16 * US);
}

#[test]
fn sums_take_the_time_that_was_read_on_the_card() {
    let readings = include_str!("../../../data/measured/h200-calibration-2026-11-29.csv");
    let machine = shipped_machine("h200-efa");
    let number = |parameters: &str, name: &str| -> u32 {
        let (_, rest) = parameters.split_once(name).expect("a reading names its parameters");
        rest.chars().take_while(char::is_ascii_digit).collect::<String>().parse().expect("a number")
    };
    let mut compared = 0;
    for line in
        readings.lines().filter(|line| line.starts_with("reduce_throughput,") && line.contains("ctas=1 16-byte"))
    {
        let [_, parameters, rest] = line.split('"').collect::<Vec<_>>()[..] else { panic!("{line}") };
        let read_gbs: f64 = rest.split(',').nth(1).and_then(|rate| rate.parse().ok()).expect("a rate");
        let inputs = vec![At::ME; number(parameters, "inputs=") as usize];
        // Long enough for the launch to be nothing beside it.
        let size = 1 << 30;
        let sum = reduce(&inputs, &[At::ME], size, number(parameters, "in_flight=") * 1024);
        let toy = Toy::node(1, vec![compute()]).tasks(move |_, _, _| vec![sum.clone()]);
        let end = simulate(&toy, &machine, split(1, 0, 0, 0)).end;
        let gbs = size as f64 / (end as f64 * 1e-3);
        assert!((gbs / read_gbs).ln().abs() < 0.11, "{parameters}: {gbs:.1} GB/s, read {read_gbs}");
        compared += 1;
    }
    assert_eq!(compared, 10);
}
