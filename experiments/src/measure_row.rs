//! A measured row: the columns that it shares with a sweep, what the clock showed, and everything it was made with.

use crate::checked::Checks;
use crate::compare::PHASES;
use crate::data::{Cell, DataError, Sheet};
use crate::error::ExperimentError;
use crate::plan::{Case, Draft, Fusion, assignments};
use crate::shape;
use std::collections::BTreeMap;
use std::path::Path;
use tilewire_hw::gpu::Facts;
use tilewire_hw::launch::RunTime;
use tilewire_hw::measure::spread;
use tilewire_kernels::{OptionSet, RoleKind, RoleSplit};
use tilewire_sim::predict::Clock;

/// Columns that rows of one comparison must share, beside those that name the point.
pub const PROVENANCE: [&str; 12] = [
    "machine",
    "mode",
    "protocol",
    "transport",
    REGISTRATION,
    "pacing",
    "inputs",
    "gpu",
    "driver",
    "nvrtc",
    "cubin",
    "revision",
];

/// How NICs come to the memory of ranks. Rows of a time when none did lack the column: `none`.
const REGISTRATION: &str = "registration";

/// Columns that name a point; `sweep` has them too.
const POINT: [&str; 11] =
    ["kernel", "form", "cluster", "machine", "fabric", "option_set", "options", "protocol", "mode", "clock", "seed"];

/// What `sweep` has under the same names.
const TIMES: [&str; 9] = [
    "status",
    "time_us",
    "tflops_per_gpu",
    "compute_only_us",
    "comm_only_us",
    "overlap",
    "exposed_comm_us",
    "wire_gbs",
    "logical_gbs",
];

const READINGS: [&str; 8] = [
    "time_q1_us",
    "time_q3_us",
    "span_us",
    "sm_mhz",
    "compute_only_span_us",
    "compute_only_mhz",
    "comm_only_span_us",
    "hazards",
];

const RECORD: [&str; 16] = [
    "outputs",
    "outputs_wrong",
    "outputs_worst",
    "warm_up",
    "repeats",
    "inputs",
    "transport",
    REGISTRATION,
    "pacing",
    "gpu",
    "driver",
    "nvrtc",
    "cubin",
    "revision",
    "date",
    "schedule_hash",
];

/// Names of the columns.
pub fn columns() -> Vec<String> {
    let own = |names: &[&str]| names.iter().map(|&name| name.to_owned()).collect::<Vec<_>>();
    let roles = RoleKind::ALL.map(|kind| kind.name().to_owned());
    let shapes = shape::names().map(str::to_owned);
    let mut columns = own(&POINT[..5]);
    columns.extend(shapes.chain(roles).chain(own(&POINT[5..])).chain(own(&TIMES)).chain(own(&READINGS)));
    columns.extend(own(&RECORD));
    columns
}

/// The times of one program.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Reading {
    /// Median.
    pub time_us: f64,
    /// Lower and upper quartile.
    pub quartiles_us: [f64; 2],
    /// Median from the first CTA's begin to the last one's end.
    pub span_us: f64,
    /// Median clock of the SMs.
    pub sm_mhz: f64,
}

impl Reading {
    /// Medians and quartiles of some runs.
    pub fn new(runs: &[RunTime]) -> Self {
        let of = |value: fn(&RunTime) -> f64| spread(runs.iter().map(value).collect());
        let [low, time_us, high] = of(|run| run.time_us);
        Self { time_us, quartiles_us: [low, high], span_us: of(|run| run.span_us)[1], sm_mhz: of(|run| run.sm_mhz)[1] }
    }
}

/// What was found at a point.
#[derive(Clone, Debug)]
pub struct Measured {
    /// The whole schedule.
    pub whole: Reading,
    /// Its compute alone; none with a GPU per rank.
    pub compute: Option<Reading>,
    /// Its communication alone; likewise.
    pub comm: Option<Reading>,
    /// Runs before the timed ones.
    pub warm_up: usize,
    /// Timed runs.
    pub repeats: usize,
    /// Useful FLOPs of the busiest rank.
    pub useful_flops: u64,
    /// Bytes that a rank puts to other nodes.
    pub put_bytes: u64,
    /// Outputs compared, wrong ones, worst error as a part of its bound; none where no comparison is known.
    pub outputs: Option<(u64, u64, f64)>,
}

/// What all rows of a run share.
#[derive(Clone, Debug)]
pub struct Setting {
    /// GPU and software.
    pub facts: Facts,
    /// The emulated fabric of puts, or `none`.
    pub pacing: String,
    /// Day.
    pub date: String,
}

/// The fields that identify a point, by column.
pub fn point(case: &Case, split: &RoleSplit, clock: &str) -> BTreeMap<String, String> {
    let target = &case.target;
    let values = [
        case.name.to_owned(),
        case.fusion.name().to_owned(),
        target.cluster.to_string(),
        target.machine.name.clone(),
        target.machine.fabric.name().to_owned(),
        case.set.name().to_owned(),
        case.options.to_string().replace(',', ";"),
        case.protocol_name().to_owned(),
        case.mode().to_owned(),
        clock.to_owned(),
        case.seed.to_string(),
    ];
    let mut fields: BTreeMap<String, String> = POINT.into_iter().map(str::to_owned).zip(values).collect();
    fields.extend(shape::values(&case.problem).into_iter().map(|(name, value)| (name.to_owned(), value.to_string())));
    fields.extend(RoleKind::ALL.map(|kind| (kind.name().to_owned(), split.get(kind).to_string())));
    fields
}

/// The fields of a finished point, by column; an error's words stand in the status.
pub fn fields(
    setting: &Setting,
    point: &BTreeMap<String, String>,
    outcome: &Result<Measured, String>,
    nodes: u16,
    (hazards, hash): (&str, &str),
) -> BTreeMap<String, String> {
    let mut fields = point.clone();
    let mut put = |name: &str, value: String| drop(fields.insert(name.to_owned(), value));
    let Facts { gpu, driver, nvrtc, cubin, transport, registration } = setting.facts.clone();
    for (name, value) in [
        ("gpu", gpu),
        ("driver", driver),
        ("nvrtc", nvrtc),
        ("cubin", cubin),
        ("transport", transport),
        (REGISTRATION, registration),
    ] {
        put(name, value);
    }
    put("pacing", setting.pacing.clone());
    put("inputs", "random bf16".into());
    put("date", setting.date.clone());
    put("revision", crate::provenance::REVISION.unwrap_or_default().to_owned());
    put("hazards", hazards.to_owned());
    put("schedule_hash", hash.to_owned());
    match outcome {
        Err(message) => put("status", message.replace('\n', " ")),
        Ok(m) => {
            put("status", "ok".into());
            let time = m.whole.time_us;
            let wire = m.put_bytes as f64 / time * 1e-3;
            let logical = if nodes > 1 { f64::from(nodes) / (f64::from(nodes) - 1.0) } else { 0.0 };
            for (name, value) in [
                ("time_us", time),
                ("time_q1_us", m.whole.quartiles_us[0]),
                ("time_q3_us", m.whole.quartiles_us[1]),
                ("span_us", m.whole.span_us),
                ("sm_mhz", m.whole.sm_mhz),
                ("tflops_per_gpu", m.useful_flops as f64 / time * 1e-6),
                ("wire_gbs", wire),
                ("logical_gbs", wire * logical),
            ] {
                put(name, format!("{value:.3}"));
            }
            if let (Some(compute), Some(comm)) = (m.compute, m.comm) {
                let (compute_us, comm_us) = (compute.time_us, comm.time_us);
                for (name, value) in [
                    ("compute_only_us", compute_us),
                    ("compute_only_span_us", compute.span_us),
                    ("compute_only_mhz", compute.sm_mhz),
                    ("comm_only_us", comm_us),
                    ("comm_only_span_us", comm.span_us),
                    ("overlap", (compute_us + comm_us - time) / compute_us.min(comm_us)),
                    ("exposed_comm_us", time - compute_us),
                ] {
                    put(name, format!("{value:.3}"));
                }
            }
            put("warm_up", m.warm_up.to_string());
            put("repeats", m.repeats.to_string());
            if let Some((outputs, wrong, worst)) = m.outputs {
                put("outputs", outputs.to_string());
                put("outputs_wrong", wrong.to_string());
                put("outputs_worst", format!("{worst:.3}"));
            }
        }
    }
    fields
}

/// A row that was read back.
#[derive(Clone, Debug)]
pub struct MeasuredRow {
    /// File and line.
    pub place: String,
    fields: BTreeMap<String, String>,
}

/// Columns of counts: whole numbers, or nothing where a row has none.
const COUNTS: [&str; 5] = ["seed", "outputs", "outputs_wrong", "warm_up", "repeats"];

/// No number of a row is larger: 1000 s in us.
const LARGEST: f64 = 1e9;

/// No time of a run is shorter, us: what a row shows of it ends there.
const LEAST_TIME: f64 = 1e-3;

/// Numbers that may be below zero.
const SIGNED: [&str; 2] = ["overlap", "exposed_comm_us"];

/// Reads a file of rows; lines that begin with `#` are comments.
///
/// # Errors
/// [`ExperimentError::Data`] with line and column for what `measure` does not write.
pub fn read(file: &Path) -> Result<Vec<MeasuredRow>, ExperimentError> {
    let sheet = Sheet::read(file)?;
    let names = columns();
    if sheet.columns.iter().any(|name| name == "device") {
        let problem = "rows of the host device, whose times are a CPU's and stand for no machine file; allowed: rows that \
                       `tilewire measure` wrote on GPUs";
        return Err(ExperimentError::refused(sheet.file, problem));
    }
    if let Some(missing) = names.iter().find(|name| *name != REGISTRATION && !sheet.columns.contains(name)) {
        let problem = format!("no column \"{missing}\"; allowed: a file that `tilewire measure` of this version wrote");
        return Err(ExperimentError::refused(sheet.file, problem));
    }
    let mut rows = Vec::with_capacity(sheet.rows.len());
    for row in &sheet.rows {
        let cells: BTreeMap<&str, Cell<'_>> =
            sheet.columns.iter().enumerate().map(|(i, name)| (name.as_str(), sheet.cell(row, i))).collect();
        checked(&cells)?;
        let mut fields: BTreeMap<String, String> =
            cells.into_iter().map(|(name, cell)| (name.to_owned(), cell.text.to_owned())).collect();
        fields.entry(REGISTRATION.to_owned()).or_insert_with(|| "none".to_owned());
        rows.push(MeasuredRow { place: format!("{}:{}", sheet.file, row.line), fields });
    }
    Ok(rows)
}

/// Refuses fields that no row has.
fn checked(cells: &BTreeMap<&str, Cell<'_>>) -> Result<(), DataError> {
    let whole = |name: &str| cells[name].optional("a whole number, or nothing", |_: &u64| true).map(drop);
    let shapes = shape::names();
    shapes.chain(RoleKind::ALL.map(RoleKind::name)).chain(COUNTS).try_for_each(whole)?;
    let status = cells["status"].filled()?;
    for name in TIMES.into_iter().chain(READINGS).filter(|&name| name != "status" && name != "hazards") {
        let (least, allowed) = match name {
            _ if SIGNED.contains(&name) => (-LARGEST, "a number from -1e9 to 1e9, or nothing"),
            _ if PHASES.contains(&name) => (LEAST_TIME, "a number from 0.001 to 1e9, or nothing"),
            _ => (0.0, "a number from 0 to 1e9, or nothing"),
        };
        cells[name].optional(allowed, |value: &f64| (least..=LARGEST).contains(value))?;
    }
    if status == "ok" {
        cells["time_us"].required("a number where the status is ok", |_: &f64| true)?;
    }
    Ok(())
}

impl MeasuredRow {
    /// A row by its fields, from `place`.
    pub const fn new(place: String, fields: BTreeMap<String, String>) -> Self {
        Self { place, fields }
    }

    /// A field; empty where the row has none.
    pub fn text(&self, column: &str) -> &str {
        self.fields.get(column).map_or("", String::as_str)
    }

    /// All fields, by column.
    pub const fn fields(&self) -> &BTreeMap<String, String> {
        &self.fields
    }

    /// A number; none where the field holds none.
    pub fn number(&self, column: &str) -> Option<f64> {
        self.text(column).parse().ok().filter(|value: &f64| value.is_finite())
    }

    /// Whether the point was measured and its outputs were right.
    pub fn is_ok(&self) -> bool {
        self.text("status") == "ok" && self.number("outputs_wrong").is_none_or(|wrong| wrong == 0.0)
    }

    /// Whether it is the row of this point.
    pub fn is_at(&self, point: &BTreeMap<String, String>) -> bool {
        point.iter().all(|(name, value)| self.text(name) == value)
    }

    /// What tells the row's origin from that of others.
    pub fn provenance(&self) -> Vec<(&'static str, String)> {
        PROVENANCE.map(|name| (name, self.text(name).to_owned())).to_vec()
    }

    /// The split.
    ///
    /// # Errors
    /// The field that is no number of CTAs.
    pub fn split(&self) -> Result<RoleSplit, String> {
        let mut split = RoleSplit::default();
        for kind in RoleKind::ALL {
            let text = self.text(kind.name());
            split.set(kind, text.parse().map_err(|_| format!("{kind} = \"{text}\", allowed: a number of CTAs"))?);
        }
        Ok(split)
    }

    /// The case as it would be asked for.
    ///
    /// # Errors
    /// The field that does not read.
    pub fn draft(&self) -> Result<Draft, String> {
        let shape = shape::names()
            .filter(|name| !self.text(name).is_empty())
            .map(|name| self.text(name).parse().map(|value| (name, value)).map_err(|_| format!("{name} is no number")))
            .collect::<Result<_, _>>()?;
        let options: Vec<String> =
            self.text("options").split(';').filter(|text| !text.is_empty()).map(str::to_owned).collect();
        let clock = match self.text("clock") {
            "sustained" => Clock::Sustained,
            "cold" => Clock::Cold,
            other => return Err(format!("clock = \"{other}\", allowed: sustained, cold")),
        };
        let refuse = |name: &str, allowed: &str| format!("{name} = \"{}\", allowed: {allowed}", self.text(name));
        let forms = Fusion::ALL.map(Fusion::name).join(", ");
        let fusion = Fusion::ALL.into_iter().find(|fusion| fusion.name() == self.text("form"));
        let sets = [OptionSet::Tilewire, OptionSet::Published];
        let set = sets.into_iter().find(|set| set.name() == self.text("option_set"));
        if self.text("protocol") != "fair" {
            return Err(refuse("protocol", "fair"));
        }
        Ok(Draft {
            kernel: self.text("kernel").to_owned(),
            cluster: format!("{}-{}", self.text("cluster"), self.text("machine")),
            shape,
            set: set.ok_or_else(|| refuse("option_set", "tilewire, published"))?,
            overrides: assignments(&options).map_err(|refusal| format!("options: {}", refusal.problem))?,
            split: Some(self.split()?.to_string()),
            protocol: Some(crate::cli::ProtocolArg::Fair),
            fusion: fusion.ok_or_else(|| refuse("form", &forms))?,
            seed: self
                .text("seed")
                .parse()
                .map_err(|_| format!("seed = \"{}\", allowed: a whole number", self.text("seed")))?,
            noise: false,
            execution: None,
            clock: Some(clock),
            checks: Checks::default(),
            measured: true,
        })
    }
}

/// Rows that were seen: where each point stands.
#[derive(Debug, Default)]
pub struct Seen(BTreeMap<[String; 3], String>);

impl Seen {
    /// Notes a row.
    ///
    /// # Errors
    /// [`ExperimentError::Refused`] when its point was there before.
    pub fn note(&mut self, row: &MeasuredRow) -> Result<(), ExperimentError> {
        let point = ["schedule_hash", "machine", "clock"].map(|name| row.text(name).to_owned());
        let Some(before) = self.0.insert(point, row.place.clone()) else { return Ok(()) };
        let problem = format!("the point of {before} again; a point counts once, take one of the rows away");
        Err(ExperimentError::refused(row.place.clone(), problem))
    }
}

/// Today, as `2026-11-29`, in UTC.
pub fn today() -> String {
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
    let days = now.map_or(0, |since| since.as_secs() / 86_400);
    // Howard Hinnant's civil-from-days, with years that begin in March.
    let z = days + 719_468;
    let (era, of_era) = (z / 146_097, z % 146_097);
    let year = (of_era - of_era / 1460 + of_era / 36_524 - of_era / 146_096) / 365;
    let of_year = of_era - (365 * year + year / 4 - year / 100);
    let month = (5 * of_year + 2) / 153;
    let (day, month) = (of_year - (153 * month + 2) / 5 + 1, if month < 10 { month + 3 } else { month - 9 });
    format!("{:04}-{month:02}-{day:02}", era * 400 + year + u64::from(month <= 2))
}
