//! `calibrate --fabric`: what the wire between two ranks does, as parameters of a machine file.
//!
//! ```text
//! rank 0 ── flags, writes of many sizes ──▶ rank 1      readings.csv ─▶ BASE.toml with the wire's values
//! both   ── ops, flags, launches of the host device     ─▶ host.toml ─▶ predicts gemm_rs, which then runs over the wire
//! ```
//!
//! The second file has the speed of CPU threads in place of SMs; it exists to hold the calibration against a run that it
//! has not seen. Over a software NIC every value says so: a smoke test, no claim about hardware.

use crate::calibrate::{Fitted, line, machine_text, shortest};
use crate::cli::{CalibrateArgs, ProtocolArg};
use crate::engine::{self, Prepared};
use crate::error::ExperimentError;
use crate::measure_host::{Runs, memory_directory, point};
use crate::measure_row::today;
use crate::plan::{Case, Draft, Fusion, Source, flagged, split};
use crate::progress;
use crate::provenance::{Output, REVISION};
use crate::ranks::{Part, carrier, proxies, take_part, wire, writable};
use crate::table::Table;
use std::fmt::Write as _;
use std::time::Duration;
use tilewire_hw::bootstrap::Session;
use tilewire_hw::host::speed::{OpTime, beside_resting, flag_latencies, launch_s, op_times};
use tilewire_hw::host::{HostError, Memory, share};
use tilewire_hw::measure::spread;
use tilewire_hw::probe::rdma::Seat;
use tilewire_hw::transport::exercise::Pair;
use tilewire_hw::transport::registration::Path as Way;
use tilewire_hw::transport::segment::Layout;
use tilewire_kernels::{Cluster, OptionSet, schedule_hash};
use tilewire_sim::Clock;
use tilewire_sim::machine::{Carrier, Machine};

/// Two nodes of a rank each.
const CLUSTER: Cluster = Cluster { nodes: 2, gpus_per_node: 1 };
/// Machine whose other values are kept.
const MACHINE: &str = "h200-cx7";
/// Slots for flags, more than [`ROUNDS`].
const SLOTS: u32 = 512;
/// Latencies of each kind.
const ROUNDS: u32 = 200;
/// Times that every stream is repeated.
const REPEATS: usize = 3;
/// Payloads whose latency is read.
const LATENCY_BYTES: [u32; 4] = [64, 1024, 16_384, 262_144];
/// Payloads of streams; the first gives the message rate, the last the bandwidth.
const STREAM_BYTES: [u32; 5] = [4, 4096, 65_536, 262_144, 1 << 20];
/// Payload for the numbers of queue pairs and of writes in flight.
const QUEUE_BYTES: u32 = 65_536;
const QUEUE_PAIRS: [u16; 4] = [1, 2, 4, 8];
const IN_FLIGHT: [u64; 4] = [1, 4, 16, 64];
/// A value as good as the best one.
const AS_GOOD: f64 = 0.95;
/// Threads of a rank that rest while one computes: its other CTAs, its proxy, its watch.
const RESTING: usize = 4;
/// Split of the host device's runs: one CTA each.
const SPLIT: &str = "compute=1,send=1,reduce=1";
/// m, n, k of what the host device's ops are read from, and of what is predicted then.
const OP_SHAPES: [[u64; 3]; 2] = [[64, 128, 32], [64, 128, 160]];
const PREDICTED_SHAPES: [[u64; 3]; 2] = [[256, 128, 64], [256, 256, 16]];

/// What was read between the ranks.
#[derive(Clone, Debug)]
struct Reading {
    what: &'static str,
    bytes: u32,
    queue_pairs: u16,
    in_flight: u64,
    unit: &'static str,
    /// First quartile, median and third quartile.
    spread: [f64; 3],
}

/// Runs the command; rank 0 writes the machine files and returns what to print.
///
/// # Errors
/// [`ExperimentError`].
pub fn run(args: &CalibrateArgs) -> Result<String, ExperimentError> {
    let source = Source::new(args.data.data.as_deref(), args.data.machine.as_deref())?;
    let mut base = source.machine_or(MACHINE)?;
    // One rail is measured; a rank takes one NIC of however many.
    base.nic.rails.value = 1.0;
    if carrier(&args.ranks, &base) == Carrier::VerbsSrd {
        let problem = "verbs-srd writes no flags after data, which the readings time; allowed: loopback, verbs-rc";
        return Err(ExperimentError::refused("--transport", problem));
    }
    if let Some(way) = args.ranks.registration.filter(|way| *way != Way::Host) {
        let problem = format!("{way}: the memory of the ranks is the host's; allowed: host");
        return Err(ExperimentError::refused("--registration", problem));
    }
    if let Some(several) = args.ranks.nics.iter().find(|names| names.contains('+')) {
        let problem = format!("{several}: several NICs of a rank; allowed: one, whose rail is measured");
        return Err(ExperimentError::refused("--nics", problem));
    }
    if !wire(&args.ranks, &base, 0)?.carries(base.fabric) {
        let problem = format!(
            "{} does not carry the fabric of {}, {}; name a machine of its fabric with --machine",
            carrier(&args.ranks, &base).name(),
            base.name,
            base.fabric
        );
        return Err(ExperimentError::refused("--transport", problem));
    }
    let session = match take_part(&args.ranks, CLUSTER, "--fabric", || writable(&args.output))? {
        Part::Parent => return Ok(String::new()),
        Part::Rank(session) => session,
    };
    let result = calibrate(args, &source, &base, &session);
    if let Err(error) = &result {
        session.abort(&error.to_string());
    }
    result
}

fn lost(what: &str, source: impl Into<HostError>) -> ExperimentError {
    crate::ranks::lost(format!("calibrate --fabric, {what}"), source.into())
}

fn calibrate(
    args: &CalibrateArgs,
    source: &Source,
    base: &Machine,
    session: &Session,
) -> Result<String, ExperimentError> {
    let (readings, transport) = read_wire(args, base, session).map_err(|error| lost("the wire", error))?;
    // Both ranks at once, as in a run.
    session.barrier().map_err(|error| lost("the host", error))?;
    let host = beside_resting(RESTING, || read_host(source, base))?;
    session.barrier().map_err(|error| lost("the host", error))?;
    let mut runs = Vec::new();
    for shape in PREDICTED_SHAPES {
        let case = case(source, base, shape)?;
        let schedule = engine::build(&case)?;
        let split = split(SPLIT).map_err(|refusal| ExperimentError::refused("split", refusal.problem))?;
        let often = Runs { count: 5, record: false };
        let report = point(&args.ranks, &case, &schedule, (split, Way::Host), session, often)
            .map_err(|error| lost("gemm_rs", error))?;
        let text = serde_json::to_vec(&report.times_us).unwrap_or_default();
        let all = session.exchange(&text).map_err(|error| lost("gemm_rs", error))?;
        let ranks: Vec<Vec<f64>> = all.iter().filter_map(|text| serde_json::from_slice(text).ok()).collect();
        let slowest = |run: usize| ranks.iter().filter_map(|times| times.get(run)).copied().fold(0.0, f64::max);
        // The first run finds cold caches and untouched pages.
        let measured_us = spread((1..5).map(slowest).collect());
        runs.push((shape, schedule_hash(&schedule, &split).to_string(), measured_us));
    }
    if session.place().rank != 0 {
        return Ok(String::new());
    }
    write(args, source, base, &readings, &host, &runs, &transport)
}

/// Reads the wire; returns nothing on rank 1.
fn read_wire(args: &CalibrateArgs, base: &Machine, session: &Session) -> Result<(Vec<Reading>, String), HostError> {
    let me = session.place().rank;
    let mut machine = base.clone();
    machine.transport.queue_pairs = QUEUE_PAIRS.last().copied();
    machine.set("proxy.in_flight", IN_FLIGHT[IN_FLIGHT.len() - 1] as f64);
    let refused = |error: ExperimentError| HostError::Unsupported { what: error.to_string() };
    let wire = wire(&args.ranks, &machine, me as u16).map_err(refused)?;
    let layout = Layout::plain(SLOTS, u64::from(STREAM_BYTES[STREAM_BYTES.len() - 1]));
    let segments = share(session, &layout, &memory_directory(), |_| wire.maps_all())?;
    let memory = Memory::Host(&segments);
    let mut wires = wire.connect(session, CLUSTER, &Seat::of_cpu(0), memory, proxies(&args.ranks, &machine).min(1))?;
    let name = wires.name();
    let Some(segment) = segments[me as usize].clone() else { return Ok((Vec::new(), name)) };
    let transport = wires.transports[0].as_mut();
    let data = layout.buffer(0).0;
    let mut pair = Pair::new(session, &segment, data, transport, 1 - me, Duration::from_secs(60));
    let bar = progress::bar(
        (1 + LATENCY_BYTES.len() + STREAM_BYTES.len() + QUEUE_PAIRS.len() + IN_FLIGHT.len()) as u64,
        "calibrating",
    );
    let mut readings = Vec::new();
    let reading = |what, bytes, (queue_pairs, in_flight), unit, values: Vec<f64>| Reading {
        what,
        bytes,
        queue_pairs,
        in_flight,
        unit,
        spread: spread(values),
    };
    session.barrier()?;
    readings.push(reading("flag latency, one way", 0, (1, 1), "us", pair.latency_us(ROUNDS, 0)?));
    for bytes in LATENCY_BYTES {
        session.barrier()?;
        readings.push(reading("latency, one way", bytes, (1, 1), "us", pair.latency_us(ROUNDS / 4, bytes)?));
        bar.inc(1);
    }
    session.barrier()?;
    let service = pair.service_us(ROUNDS)?;
    for (at, what) in ["post", "completion after post", "poll of a completion"].into_iter().enumerate() {
        readings.push(reading(what, 0, (1, 1), "us", service.iter().map(|times| times[at]).collect()));
    }
    bar.inc(1);
    let mut stream = |what, bytes: u32, queue_pairs: u16, in_flight: u64| -> Result<Reading, HostError> {
        let count = u64::from((16 << 20) / bytes).clamp(32, 512);
        let mut values = Vec::new();
        for _ in 0..REPEATS {
            session.barrier()?;
            let time_s = pair.stream(bytes, count, queue_pairs, in_flight)?;
            values.push(time_s * 1e6 / count as f64);
        }
        bar.inc(1);
        Ok(reading(what, bytes, (queue_pairs, in_flight), "us per write", values))
    };
    for bytes in STREAM_BYTES {
        readings.push(stream("stream", bytes, 1, 16)?);
    }
    for queue_pairs in QUEUE_PAIRS {
        readings.push(stream("stream over queue pairs", QUEUE_BYTES, queue_pairs, 16)?);
    }
    for in_flight in IN_FLIGHT {
        readings.push(stream("stream with writes in flight", QUEUE_BYTES, 1, in_flight)?);
    }
    session.barrier()?;
    bar.finish_and_clear();
    Ok((if me == 0 { readings } else { Vec::new() }, name))
}

fn case(source: &Source, machine: &Machine, [m, n, k]: [u64; 3]) -> Result<Case, ExperimentError> {
    let small = [("tile_m", "16"), ("tile_n", "32"), ("tile_k", "16")];
    let draft = Draft {
        kernel: "gemm_rs".into(),
        cluster: format!("{CLUSTER}-{}", machine.name),
        shape: vec![("m", m), ("n", n), ("k", k)],
        set: OptionSet::Tilewire,
        overrides: small.map(|(name, value)| (name.to_owned(), value.to_owned())).to_vec(),
        split: Some(SPLIT.into()),
        protocol: Some(ProtocolArg::Fair),
        fusion: Fusion::Fused,
        seed: 0,
        noise: false,
        execution: None,
        clock: Some(Clock::Sustained),
        checks: crate::checked::Checks::default(),
        measured: false,
    };
    draft.resolve(&source.with(machine.clone())).map_err(flagged)
}

fn fitted(name: &'static str, [low, value, high]: [f64; 3], kind: &'static str, how: impl Into<String>) -> Fitted {
    Fitted { name, value, low, high, kind, how: how.into() }
}

/// The host device's values, in place of a GPU's.
fn read_host(source: &Source, base: &Machine) -> Result<Vec<Fitted>, ExperimentError> {
    let mut ops: Vec<OpTime> = Vec::new();
    for shape in OP_SHAPES {
        let schedule = engine::build(&case(source, base, shape)?)?;
        for _ in 0..REPEATS {
            ops.extend(op_times(&schedule).map_err(|error| lost("the host's ops", error))?);
        }
    }
    let mut fits = Vec::new();
    let tiles: Vec<&OpTime> = ops.iter().filter(|op| op.kind == "gemm_tile").collect();
    let points: Vec<(f64, f64)> = tiles.iter().map(|op| (f64::from(op.steps), op.steps_s * 1e9)).collect();
    if let (Some((fixed_ns, step_ns, _)), Some(tile)) = (line(&points), tiles.first()) {
        let how =
            format!("{} tiles on a CPU thread beside resting ones, a line through their time by steps", tiles.len());
        let rate = tile.step_flops as f64 / step_ns * 1e-3;
        for (rate_name, fixed_name) in [
            ("gemm.wait_each_step.sm_tflops", "gemm.wait_each_step.epilogue_ns"),
            ("gemm.pipelined.sm_tflops", "gemm.pipelined.epilogue_ns"),
        ] {
            fits.push(fitted(rate_name, [rate; 3], "derived", how.clone()));
            fits.push(fitted(fixed_name, [fixed_ns.max(0.0); 3], "derived", how.clone()));
        }
    }
    let mut rate = |name, what: &str, which: &dyn Fn(&&OpTime) -> bool, bytes: &dyn Fn(&OpTime) -> u64| {
        let rates: Vec<f64> = ops.iter().filter(which).map(|op| bytes(op) as f64 / op.output_s * 1e-9).collect();
        if !rates.is_empty() {
            let how = format!("{} {what} on a CPU thread beside resting ones; median and quartiles", rates.len());
            fits.push(fitted(name, spread(rates), "derived", how));
        }
    };
    rate("sm.copy_cta_gbs", "stores of a tile", &|op| op.kind == "gemm_tile" && !op.adds, &|op| op.written_bytes);
    rate("sm.add_cta_gbs", "adds of a tile", &|op| op.kind == "gemm_tile" && op.adds, &|op| op.written_bytes);
    rate("sm.reduce_cta_gbs", "sums", &|op| op.kind == "reduce", &|op| op.read_bytes + op.written_bytes);
    rate("sm.fill_cta_gbs", "fills", &|op| op.kind == "fill", &|op| op.written_bytes);
    let flags: Vec<f64> = flag_latencies(ROUNDS).into_iter().map(|seconds| seconds * 1e9).collect();
    let flag = spread(flags);
    let how = "a store seen by a thread that rests between its looks; median and quartiles";
    for name in ["flags.local_ns", "flags.nic_ns", "proxy.fifo_latency_ns"] {
        fits.push(fitted(name, flag, "derived", how));
    }
    let launch = spread((0..20).map(|_| launch_s(4) * 1e6).collect());
    for name in ["launch.command_us", "launch.dependent_us"] {
        fits.push(fitted(name, launch, "derived", "start and end of the threads of a rank; median and quartiles"));
    }
    let nothing = "no such cost on a CPU thread, or held in the rates";
    for name in [
        "gemm.wait_each_step.fill_ns",
        "gemm.wait_each_step.smem_read_ns",
        "gemm.wait_each_step.visible_ns",
        "gemm.pipelined.fill_ns",
        "gemm.pipelined.smem_read_ns",
        "gemm.pipelined.visible_ns",
        "sm.local_latency_ns",
        "sm.reduce_latency_ns",
        "proxy.push_ns",
    ] {
        fits.push(fitted(name, [0.0; 3], "assumed", nothing));
    }
    for name in ["gpu.droop_knee_tflops", "gpu.cold_knee_tflops"] {
        fits.push(fitted(name, [1e6; 3], "assumed", "a CPU's clock does not follow this work"));
    }
    Ok(fits)
}

/// The wire's values.
fn wire_values(readings: &[Reading]) -> (Vec<Fitted>, u16) {
    let of = |what: &str| readings.iter().filter(|reading| reading.what == what).collect::<Vec<_>>();
    let median = |what: &str| of(what).first().map_or(f64::NAN, |reading| reading.spread[1]);
    let post = of("post")[0].spread;
    let less = |spread: [f64; 3], by: f64| spread.map(|value| (value - by).max(0.0));
    let streams = of("stream");
    let (small, large) = (streams[0], streams[streams.len() - 1]);
    let latency = less(of("flag latency, one way")[0].spread, post[1]);
    let ack = less(of("completion after post")[0].spread, latency[1]);
    let best = |what: &str| of(what).iter().map(|reading| reading.spread[1]).fold(f64::INFINITY, f64::min);
    let least = |what: &str| {
        let good = best(what) / AS_GOOD;
        of(what).into_iter().find(|reading| reading.spread[1] <= good).cloned()
    };
    let in_flight = least("stream with writes in flight").map_or(1, |reading| reading.in_flight);
    let queue_pairs = least("stream over queue pairs").map_or(1, |reading| reading.queue_pairs);
    let [low, middle, high] = large.spread.map(|us| f64::from(large.bytes) / us * 1e-3);
    let fits = vec![
        fitted("proxy.post_ns", post.map(|us| us * 1e3), "measured", "a write and its flag posted alone"),
        fitted(
            "proxy.completion_ns",
            of("poll of a completion")[0].spread.map(|us| us * 1e3),
            "measured",
            "the poll that brings a completion",
        ),
        fitted(
            "proxy.in_flight",
            [in_flight as f64; 3],
            "derived",
            format!("fewest of {IN_FLIGHT:?} with 95 % of the best bandwidth at {QUEUE_BYTES} bytes"),
        ),
        fitted("nic.rails", [1.0; 3], "measured", "one NIC was used"),
        fitted("nic.rail_gbs", [high, middle, low], "measured", format!("stream of {} bytes", large.bytes)),
        fitted(
            "nic.message_ns",
            small.spread.map(|us| us * 1e3),
            "measured",
            format!("stream of {} bytes, time of a write", small.bytes),
        ),
        fitted("network.latency_us", latency, "derived", "half a round trip of a flag, less its post"),
        fitted(
            "network.ack_us",
            ack,
            "derived",
            format!("{} us to a completion, less the way there", shortest(median("completion after post"), 3)),
        ),
    ];
    (fits, queue_pairs)
}

/// Writes readings and machine files, predicts what ran, and says how far off that is.
fn write(
    args: &CalibrateArgs,
    source: &Source,
    base: &Machine,
    readings: &[Reading],
    host: &[Fitted],
    runs: &[([u64; 3], String, [f64; 3])],
    transport: &str,
) -> Result<String, ExperimentError> {
    let (wire, queue_pairs) = wire_values(readings);
    let date = today();
    let revision = REVISION.unwrap_or("unknown revision");
    let software = if transport.contains("in software") || transport.starts_with("loopback") {
        ", software, no claim about hardware"
    } else {
        ""
    };
    let provenance = format!("calibrate --fabric, {date}, {transport}{software}, revision {revision}");
    let text = source.machine_text(base)?;
    let named = |name: &str, about: &str, text: String| {
        let head = |key: &str, value: &str, text: &str| {
            let old = text.lines().find(|line| line.starts_with(&format!("{key} = "))).unwrap_or_default().to_owned();
            text.replacen(&old, &format!("{key} = \"{value}\""), 1)
        };
        let text = head("about", about, &head("name", name, &text));
        // Choices of the base are its own; this one was found here.
        let text = text.split("\n[transport]").next().unwrap_or_default().to_owned();
        format!("{text}\n[transport]\nqueue_pairs = {queue_pairs}\n")
    };
    let of_wire = machine_text(&text, &wire, &provenance, &date);
    let wire_name = format!("{}-wire", base.name);
    let about = format!("{} with its wire as calibrated over {transport}{software}.", base.name);
    let wire_text = named(&wire_name, &about, of_wire.clone());
    let about = format!(
        "CPU threads as SMs, over {transport}: to test a calibration, no GPU; what they do not use is of {}.",
        base.name
    );
    let host_text = named("host", &about, machine_text(&of_wire, host, &provenance, &date));
    let broken =
        |error: tilewire_sim::machine::MachineError| ExperimentError::refused("calibrate --fabric", error.to_string());
    Machine::parse("wire.toml", &wire_text).map_err(broken)?;
    let machine = Machine::parse("host.toml", &host_text).map_err(broken)?;
    let wire_file = format!("{wire_name}.toml");
    let files = ["readings.csv", &wire_file, "host.toml", "predicted.csv"];
    let output = Output::create(&args.output, "calibrate --fabric", None, None, source, &[base], &files)?;
    let mut csv = String::from("what,bytes,queue_pairs,in_flight,unit,low,median,high,transport\n");
    for Reading { what, bytes, queue_pairs, in_flight, unit, spread: [low, median, high] } in readings {
        let _ = writeln!(
            csv,
            "\"{what}\",{bytes},{queue_pairs},{in_flight},{unit},{low:.3},{median:.3},{high:.3},\"{transport}\""
        );
    }
    output.write("readings.csv", &csv)?;
    output.write(&wire_file, &wire_text)?;
    output.write("host.toml", &host_text)?;
    let mut table = Table::new(["parameter", "value", "low", "high", "kind", "from"]);
    for fit in &wire {
        let [value, low, high] = [fit.value, fit.low, fit.high].map(|value| shortest(value, 4));
        table.row([fit.name.to_owned(), value, low, high, fit.kind.to_owned(), fit.how.clone()]);
    }
    let mut judged = Table::new(["shape", "predicted_us", "measured_us", "low", "high", "error"]);
    let mut errors = String::from("m,n,k,schedule_hash,predicted_us,measured_us,low,high\n");
    for ([m, n, k], hash, [low, measured, high]) in runs {
        let case = case(source, &machine, [*m, *n, *k])?;
        let prepared = Prepared::new(&case)?;
        let answer = prepared.predict(&case, &prepared.split(&case)?)?;
        let predicted = answer.prediction.time_us;
        if answer.schedule_hash != *hash {
            let what = format!("gemm_rs {m} x {n} x {k} ran as {hash} and was predicted as {}", answer.schedule_hash);
            return Err(ExperimentError::Finding(what));
        }
        let number = |value: f64| format!("{value:.0}");
        let error = format!("{:+.0}%", (predicted / measured - 1.0) * 100.0);
        judged.row([
            format!("{m} x {n} x {k}"),
            number(predicted),
            number(*measured),
            number(*low),
            number(*high),
            error,
        ]);
        let _ = writeln!(errors, "{m},{n},{k},{hash},{predicted:.1},{measured:.1},{low:.1},{high:.1}");
    }
    output.write("predicted.csv", &errors)?;
    Ok(format!(
        "over {transport}{software}\n{}\nqueue pairs {queue_pairs}\n\ngemm_rs {CLUSTER} on the host device, a prediction from these values beside its run:\n{}\nwrote {} and host.toml, readings.csv, predicted.csv beside it\n",
        table.render(2),
        judged.render(0),
        output.path(&wire_file).display()
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_follow_from_readings() {
        let reading = |what, bytes, queue_pairs, in_flight, us: f64| Reading {
            what,
            bytes,
            queue_pairs,
            in_flight,
            unit: "us",
            spread: [us * 0.9, us, us * 1.1],
        };
        let mut readings = vec![
            reading("flag latency, one way", 0, 1, 1, 5.0),
            reading("post", 0, 1, 1, 1.0),
            reading("completion after post", 0, 1, 1, 9.0),
            reading("poll of a completion", 0, 1, 1, 0.5),
            reading("stream", 4, 1, 16, 2.0),
            reading("stream", 1 << 20, 1, 16, 100.0),
        ];
        // Two queue pairs and 16 writes in flight are within 5 % of the best.
        readings.extend(
            [(1, 20.0), (2, 10.2), (4, 10.0), (8, 10.1)]
                .map(|(queue_pairs, us)| reading("stream over queue pairs", QUEUE_BYTES, queue_pairs, 16, us)),
        );
        readings.extend(
            [(1, 40.0), (4, 11.0), (16, 10.2), (64, 10.0)]
                .map(|(in_flight, us)| reading("stream with writes in flight", QUEUE_BYTES, 1, in_flight, us)),
        );
        let (fits, queue_pairs) = wire_values(&readings);
        let value = |name: &str| fits.iter().find(|fit| fit.name == name).map_or(f64::NAN, |fit| fit.value);
        let expected = [
            ("network.latency_us", 4.0),
            ("network.ack_us", 5.0),
            ("proxy.post_ns", 1000.0),
            ("proxy.completion_ns", 500.0),
            ("proxy.in_flight", 16.0),
            ("nic.message_ns", 2000.0),
            ("nic.rail_gbs", 10.485_76),
        ];
        for (name, expected) in expected {
            assert!((value(name) - expected).abs() < 1e-9, "{name}: {} for {expected}", value(name));
        }
        assert_eq!(queue_pairs, 2);
        assert!(fits.iter().all(|fit| fit.low <= fit.value && fit.value <= fit.high), "spread around the value");
    }
}
