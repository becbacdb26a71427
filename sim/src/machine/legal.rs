//! What a machine file may say, and where in it a mistake stands.

use super::{Machine, MachineError, Param};
use toml::Spanned;
use toml::de::{DeTable, DeValue};

/// Main loops that every machine describes.
const LOOPS: [&str; 3] = ["wait_each_step", "pipelined", "library"];

/// Legal values of a parameter.
struct Range {
    min: f64,
    max: f64,
    unit: &'static str,
    whole: bool,
}

impl std::fmt::Display for Range {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let what = if self.whole { "a whole number" } else { "a number" };
        let space = if self.unit.is_empty() { "" } else { " " };
        write!(f, "{what} from {} to {}{space}{}", self.min, self.max, self.unit)
    }
}

/// Counts, ratios and widths that say no unit, by the last part of their name. Wide enough for any machine that one
/// might think of; narrow enough that no time overflows and no typing mistake of many digits looks like a result.
const NAMED: &[(&str, f64, f64, bool)] = &[
    ("sms", 1.0, 1024.0, true),
    ("fifo_depth", 1.0, 1e6, true),
    ("threads", 1.0, 1024.0, true),
    ("in_flight", 1.0, 1e6, true),
    ("rails", 1.0, 64.0, true),
    ("nodes_per_leaf", 1.0, 65_536.0, true),
    ("domain_gpus", 1.0, 1024.0, true),
    ("bus_gpus", 1.0, 1024.0, true),
    ("oversubscription", 1.0, 1000.0, false),
    ("many_peers_share", 0.01, 1.0, false),
    ("add_link_bytes_per_byte", 0.1, 100.0, false),
    ("nvls_load_link_bytes_per_byte", 0.1, 100.0, false),
    ("l2_drift_hits", 0.0, 1.0, false),
    ("hbm_write_bytes_per_byte", 0.1, 100.0, false),
    ("hbm_power_flop_per_byte", 0.0, 1e6, false),
    ("box_power_flop", 0.0, 1e12, false),
    ("store_steps", 0.0, 1024.0, true),
    ("move_crowd_per_cta", 0.0, 1.0, false),
    ("attention_power", 0.01, 100.0, false),
];

/// Units at the end of a name. A rate below a byte or a kiloflop a second moves nothing in any time that somebody
/// waits for; ranks that are threads of an emulated CPU come within some factors of ten of it.
const UNITS: &[(&str, &str, f64, f64)] = &[
    ("_gbs", "GB/s", 1e-9, 1e6),
    ("_tflops", "TFLOPS", 1e-9, 1e6),
    ("_ns", "ns", 0.0, 1e9),
    ("_us", "us", 0.0, 1e7),
    ("_ms", "ms", 0.0, 1e6),
    ("_kib", "KiB", 1.0, 1e6),
    ("_mib", "MiB", 0.0, 1e6),
    ("_sigma", "", 0.0, 2.0),
];

fn range(name: &str) -> Range {
    let last = name.rsplit('.').next().unwrap_or(name);
    if let Some(&(_, min, max, whole)) = NAMED.iter().find(|named| named.0 == last) {
        return Range { min, max, unit: "", whole };
    }
    let unit = UNITS.iter().find(|unit| last.ends_with(unit.0));
    let (unit, min, max) = unit.map_or(("", 0.0, 1e12), |&(_, unit, min, max)| (unit, min, max));
    // A chip without static power is a model that one may ask for.
    let min = if last.ends_with("_static_tflops") { 0.0 } else { min };
    Range { min, max, unit, whole: false }
}

/// Reads a machine file.
pub(super) fn parse(file: &str, text: &str) -> Result<Machine, MachineError> {
    let places = DeTable::parse(text).map_err(|error| broken(file, text, None, &error))?;
    let machine: Machine = toml::from_str(text).map_err(|error| broken(file, text, Some(places.get_ref()), &error))?;
    let at = |name: &str| MachineError::place(file, text, start_of(places.get_ref(), name).unwrap_or(0));
    // It names files and clusters.
    let plain = |c: char| c.is_ascii_alphanumeric() || c == '-' || c == '_';
    if machine.name.is_empty() || !machine.name.chars().all(plain) {
        let message = format!("name = \"{}\", allowed: letters, digits, - and _", machine.name.escape_debug());
        return Err(MachineError::Parse { place: at("name"), message });
    }
    if machine.emulated != machine.name.contains("-emulated-") {
        let message = format!(
            "name = \"{}\" with emulated = {}, allowed: -emulated- in the name of such machines and of no others",
            machine.name, machine.emulated
        );
        return Err(MachineError::Parse { place: at("name"), message });
    }
    for (kind, names) in
        [("gemm", machine.gemm.keys().collect::<Vec<_>>()), ("attention", machine.attention.keys().collect::<Vec<_>>())]
    {
        if let Some(unknown) = names.iter().find(|name| !LOOPS.contains(&name.as_str())) {
            let section = format!("{kind}.{unknown}");
            let message = format!("{section}: no such main loop, allowed: {}", LOOPS.join(", "));
            return Err(MachineError::Parse { place: at(&section), message });
        }
        if let Some(missing) = LOOPS.iter().find(|name| !names.iter().any(|known| known == *name)) {
            return Err(MachineError::Parse {
                place: at(kind),
                message: format!("missing section [{kind}.{missing}]"),
            });
        }
    }
    for (name, param) in machine.params() {
        check(&name, param, &at)?;
    }
    machine.transport.check(machine.nic.rails.value, &at)?;
    Ok(machine)
}

fn check(name: &str, param: &Param, at: &impl Fn(&str) -> String) -> Result<(), MachineError> {
    let range = range(name);
    let value = param.value;
    if !(range.min..=range.max).contains(&value) || (range.whole && value.fract() != 0.0) {
        return Err(MachineError::Range {
            place: at(&format!("{name}.value")),
            name: name.to_owned(),
            value,
            allowed: range.to_string(),
        });
    }
    if param.source.trim().is_empty() {
        return Err(MachineError::Provenance { place: at(&format!("{name}.source")), name: name.to_owned() });
    }
    if !is_date(&param.date) {
        return Err(MachineError::Date {
            place: at(&format!("{name}.date")),
            name: name.to_owned(),
            date: param.date.clone(),
        });
    }
    Ok(())
}

/// Whether a text is a day of the calendar, `YYYY-MM-DD`.
fn is_date(text: &str) -> bool {
    text.len() == 10
        && text.parse::<toml::value::Datetime>().is_ok_and(|date| date.date.is_some() && date.time.is_none())
}

/// The parser's words with their place and key, in one line.
fn broken(file: &str, text: &str, table: Option<&DeTable<'_>>, error: &toml::de::Error) -> MachineError {
    let start = error.span().map_or(0, |span| span.start);
    // What is missing in a section stands at its header.
    let begins_line = text[..start].is_empty() || text[..start].ends_with('\n');
    let header = text[start..].strip_prefix('[').filter(|_| begins_line).and_then(|rest| rest.split_once(']'));
    let key = header.map(|(name, _)| name.to_owned()).or_else(|| table.and_then(|table| key_at(table, start)));
    let key = key.map_or_else(String::new, |key| format!("{key}: "));
    let message = format!("{key}{}", error.message().replace('\n', " "));
    MachineError::Parse { place: MachineError::place(file, text, start), message }
}

/// Where the value of a dotted name starts; of the longest part of the name that exists.
fn start_of(table: &DeTable<'_>, name: &str) -> Option<usize> {
    let (first, rest) = name.split_once('.').map_or((name, None), |(first, rest)| (first, Some(rest)));
    let (key, value) = table.iter().find(|(key, _)| key.get_ref().as_ref() == first)?;
    let inner = rest.and_then(|rest| start_of(value.get_ref().as_table()?, rest));
    let own = if value.get_ref().as_table().is_some() { key.span().start } else { value.span().start };
    Some(inner.unwrap_or(own))
}

/// The dotted name of the innermost value that stands at a byte of the text.
fn key_at(table: &DeTable<'_>, at: usize) -> Option<String> {
    let inside = |value: &Spanned<DeValue<'_>>, from: usize| (from..value.span().end).contains(&at);
    table.iter().find_map(|(key, value)| {
        let deeper = value.get_ref().as_table().and_then(|inner| key_at(inner, at));
        let own = inside(value, key.span().start).then(String::new);
        let rest = deeper.map(|inner| format!(".{inner}")).or(own)?;
        Some(format!("{}{rest}", key.get_ref()))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const FILE: &str = include_str!("../../../data/machines/h200-efa.toml");

    /// The shipped file with one line changed.
    fn refused(from: &str, to: &str) -> String {
        assert!(FILE.contains(from), "{from}");
        let text = FILE.replacen(from, to, 1);
        let message = parse("m.toml", &text).expect_err(to).to_string();
        assert!(message.lines().count() <= 3, "{message}");
        let line = FILE[..FILE.find(from).unwrap_or(0)].matches('\n').count() + 1;
        assert!(message.starts_with(&format!("m.toml:{line}:")), "line {line}: {message}");
        message
    }

    /// The line of a parameter, and the same with another value.
    fn value(name: &str, value: &str) -> (String, String) {
        let line = FILE.lines().find(|line| line.trim_start().starts_with(&format!("{name} "))).expect("a parameter");
        let (head, tail) = line.split_once("value = ").expect("a value");
        let (_, tail) = tail.split_once(',').expect("a kind");
        (line.to_owned(), format!("{head}value = {value},{tail}"))
    }

    #[test]
    fn values_out_of_range_are_refused_with_line_and_range() {
        for (name, bad, allowed) in [
            ("hbm_gbs", "1e-30", "from 0.000000001 to 1000000 GB/s"),
            ("hbm_gbs", "inf", "GB/s"),
            ("hbm_gbs", "nan", "GB/s"),
            ("hbm_gbs", "-1", "GB/s"),
            ("sms", "1e9", "a whole number from 1 to 1024"),
            ("sms", "131.5", "a whole number"),
            ("add_link_bytes_per_byte", "0", "from 0.1 to 100"),
            ("in_flight", "0", "a whole number from 1"),
            ("local_ns", "1e10", "ns"),
            ("oversubscription", "0.5", "from 1 to 1000"),
        ] {
            let (from, to) = value(name, bad);
            let message = refused(&from, &to);
            assert!(message.contains(name) && message.contains(allowed), "{message}");
        }
    }

    #[test]
    fn mistakes_of_form_name_line_and_key() {
        let (from, to) = value("hbm_gbs", "\"fast\"");
        assert!(refused(&from, &to).contains("gpu.hbm_gbs.value: invalid type"));
        assert!(refused(&from, "hbm_gbs = [1, 2]").contains("gpu.hbm_gbs: "));
        let (from, _) = value("hbm_gbs", "1");
        assert!(refused(&from, &from.replace("hbm_gbs", "hbm_gbps")).contains("unknown field `hbm_gbps`"));
        assert!(refused(&from, &from.replace("date = \"2026-", "date = \"2026-13-")).contains("gpu.hbm_gbs.date"));
        assert!(refused(&from, &from.replace("date = ", "day = ")).contains("gpu.hbm_gbs"));
        for (section, name) in [("noise", "late_rank_us"), ("gemm.pipelined", "fill_ns")] {
            let (before, rest) = FILE.split_once(&format!("[{section}]\n")).expect("a section");
            let (of_it, after) = rest.split_once("\n\n").expect("another section");
            let left: Vec<&str> = of_it.lines().filter(|line| !line.starts_with(name)).collect();
            let text = format!("{before}[{section}]\n{}\n\n{after}", left.join("\n"));
            let message = parse("m.toml", &text).expect_err(name).to_string();
            let line = before.matches('\n').count() + 1;
            assert_eq!(message, format!("m.toml:{line}:1: {section}: missing field `{name}`"));
        }
        assert!(refused("[gemm.library]", "[gemm.libary]").contains("no such main loop"));
        assert!(refused("name = \"h200-efa\"", "name = \"../up\"").contains("allowed: letters, digits, - and _"));
    }

    #[test]
    fn choices_of_the_transport_have_ranges_and_names() {
        let with = |line: &str| parse("m.toml", &format!("{FILE}\n[transport]\n{line}\n"));
        let machine = with("publish = \"immediate\"\nqueue_pairs = 8\nnics = [\"mlx5_0\", \"mlx5_1\"]").expect("legal");
        assert_eq!(machine.transport.publish, Some(super::super::Publishing::Immediate));
        assert_eq!((machine.transport.queue_pairs, machine.transport.inline_flags), (Some(8), None));
        for (line, words) in [
            ("queue_pairs = 0", "transport.queue_pairs: 0, allowed: a whole number from 1 to 1024"),
            ("queue_pairs = 100000", "transport.queue_pairs: 100000, allowed: a whole number from 1 to 1024"),
            ("gid_index = 300", "transport.gid_index: 300, allowed: a whole number from 0 to 255"),
            ("batch = -1", "transport.batch: -1, allowed: a whole number from 1 to 1024"),
            ("signal_every = \"8\"", "allowed: a whole number from 1 to 1024"),
            ("nics = [\"mlx5_0\"]", "transport.nics: 1 NICs, allowed: as many as nic.rails, 2"),
            ("nics = [\"mlx5_0\", \"mlx5_0\"]", "transport.nics: \"mlx5_0\" stands there twice"),
            ("nics = [\"mlx5_0+mlx5_1\", \"\"]", "is no name of an RDMA device"),
            ("carrier = \"tcp\"", "verbs-rc"),
            ("queue_pair = 4", "unknown field `queue_pair`"),
            ("publish = \"later\"", "same_queue_write"),
        ] {
            let message = with(line).expect_err(line).to_string();
            assert!(message.contains(words) && message.starts_with("m.toml:"), "{message}");
        }
    }

    #[test]
    fn days_are_days() {
        assert!(is_date("2024-02-29"));
        for bad in ["", "yesterday", "2026-13-01", "2026-02-30", "2026-1-1", "2026-11-29T10:00:00", "2023-02-29"] {
            assert!(!is_date(bad), "{bad}");
        }
    }
}
