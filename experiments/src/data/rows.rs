//! Rows of the published tables, each field checked.

use super::published::Standing;
use super::table::Cell;
use super::{
    DataError, EffectiveSplit, FUSED, Figure, FitParameter, FitRow, LeftOutError, Metric, OTHERS, PublishedProtocol,
    Sheet, System,
};
use tilewire_kernels::RoleSplit;
use tilewire_sim::Loop;

impl<'a> Cell<'a> {
    pub(super) fn kernel(&self) -> Result<&'a str, DataError> {
        let known = || FUSED.iter().chain(OTHERS);
        if known().any(|name| *name == self.text) {
            return Ok(self.text);
        }
        Err(self.refuse(known().copied().collect::<Vec<_>>().join(", ")))
    }

    fn fused_kernel(&self) -> Result<&'a str, DataError> {
        if FUSED.contains(&self.text) { Ok(self.text) } else { Err(self.refuse(FUSED.join(", "))) }
    }

    fn metric(&self) -> Result<Metric, DataError> {
        Ok(match self.text {
            "tflops_per_gpu" => Metric::TflopsPerGpu,
            "ms" => Metric::Ms,
            "us" => Metric::Us,
            "gbps" => Metric::Gbs,
            "speedup_vs_torch_nccl" => Metric::SpeedupVsTorchNccl,
            _ => return Err(self.refuse("tflops_per_gpu, ms, us, gbps, speedup_vs_torch_nccl")),
        })
    }

    fn options(&self) -> Result<Vec<(String, String)>, DataError> {
        let pair = |text: &str| {
            let (name, value) = text.split_once('=').ok_or_else(|| self.refuse("name=value;name=value or nothing"))?;
            Ok((name.trim().to_owned(), value.trim().to_owned()))
        };
        self.text.split(';').filter(|text| !text.trim().is_empty()).map(pair).collect()
    }
}

pub(super) fn figures(sheet: &Sheet) -> Result<Vec<Figure>, DataError> {
    let [kernel, topology, system, tokens, seq, shape_m, metric, value, notes, source] = sheet
        .find(["kernel", "topology", "system", "tokens", "seq", "shape_m", "metric", "value", "notes", "source"])?;
    let mut figures = Vec::with_capacity(sheet.rows.len());
    for row in &sheet.rows {
        let cell = |column| sheet.cell(row, column);
        let mut size = None;
        for column in [tokens, seq, shape_m] {
            size = size.or(cell(column).optional("a positive integer or nothing", |size: &u64| *size > 0)?);
        }
        let base = System::of(cell(system).text);
        let mut figure = Figure {
            kernel: cell(kernel).kernel()?.to_owned(),
            topology: cell(topology).filled()?.to_owned(),
            system: cell(system).filled()?.to_owned(),
            size,
            metric: cell(metric).metric()?,
            value: cell(value).optional("a positive number or nothing", |v: &f64| v.is_finite() && *v > 0.0)?,
            notes: cell(notes).text.to_owned(),
            source: cell(source).filled()?.to_owned(),
            standing: Standing::Shown,
            base,
            line: row.line,
        };
        figure.standing = figure.standing();
        figures.push(figure);
    }
    Ok(figures)
}

pub(super) fn effective_splits(sheet: &Sheet) -> Result<Vec<EffectiveSplit>, DataError> {
    let [kernel, nodes, size, compute, intra, send, reduce, options, note, source] =
        sheet.find(["kernel", "nodes", "size", "compute", "intra", "send", "reduce", "options", "note", "source"])?;
    let mut splits = Vec::with_capacity(sheet.rows.len());
    for row in &sheet.rows {
        let cell = |column| sheet.cell(row, column);
        let ctas = |column| cell(column).required("a number of CTAs", |ctas: &u32| *ctas <= 1024);
        splits.push(EffectiveSplit {
            kernel: cell(kernel).fused_kernel()?.to_owned(),
            nodes: cell(nodes).required("a positive integer", |nodes| *nodes > 0)?,
            size: cell(size).required("a positive integer", |size| *size > 0)?,
            split: RoleSplit {
                compute: ctas(compute)?,
                intra_comm: ctas(intra)?,
                inter_send: ctas(send)?,
                inter_reduce: ctas(reduce)?,
            },
            options: cell(options).options()?,
            note: cell(note).text.to_owned(),
            source: cell(source).filled()?.to_owned(),
        });
    }
    Ok(splits)
}

pub(super) fn protocols(sheet: &Sheet) -> Result<Vec<PublishedProtocol>, DataError> {
    let [kernel, system, up_to, stale, isolated, host, warm_up, launches, counts, nvls, note, source] =
        sheet.find([
            "kernel",
            "system",
            "up_to_size",
            "stale_arrivals",
            "isolated",
            "waits_for_host",
            "warm_up",
            "launches",
            "counts",
            "nvls_in_baseline",
            "note",
            "source",
        ])?;
    let mut protocols = Vec::with_capacity(sheet.rows.len());
    for row in &sheet.rows {
        let cell = |column| sheet.cell(row, column);
        let name = cell(system);
        protocols.push(PublishedProtocol {
            kernel: cell(kernel).fused_kernel()?.to_owned(),
            system: System::exactly(name.text).ok_or_else(|| name.refuse(System::ALL.map(System::name).join(", ")))?,
            stale_arrivals: cell(stale).required("true or false", |_| true)?,
            isolated: cell(isolated).required("true or false", |_| true)?,
            waits_for_host: cell(host).required("true or false", |_| true)?,
            up_to: cell(up_to).optional("a whole number of 1 or more, or nothing", |&size: &u64| size > 0)?,
            timed: Loop {
                warm_up: cell(warm_up).required("a whole number", |_| true)?,
                launches: cell(launches).required("a whole number of 1 or more", |&n: &u32| n > 0)?,
                median: match cell(counts).text {
                    "mean" => false,
                    "median" => true,
                    _ => return Err(cell(counts).refuse("mean, median".to_owned())),
                },
            },
            nvls_in_baseline: cell(nvls).optional("true, false or nothing", |_| true)?,
            note: cell(note).text.to_owned(),
            source: cell(source).filled()?.to_owned(),
        });
    }
    Ok(protocols)
}

pub(super) fn fit_rows(sheet: &Sheet) -> Result<Vec<FitRow>, DataError> {
    let [kernel, system, topology, size, parameters] =
        sheet.find(["kernel", "system", "topology", "size", "parameters"])?;
    let mut rows = Vec::with_capacity(sheet.rows.len());
    for row in &sheet.rows {
        let cell = |column| sheet.cell(row, column);
        rows.push(FitRow {
            kernel: cell(kernel).fused_kernel()?.to_owned(),
            system: cell(system).filled()?.to_owned(),
            topology: cell(topology).filled()?.to_owned(),
            size: cell(size).required("a whole number of 1 or more", |&n: &u64| n > 0)?,
            parameters: cell(parameters).filled()?.split_whitespace().map(str::to_owned).collect(),
        });
    }
    Ok(rows)
}

pub(super) fn left_out(sheet: &Sheet) -> Result<Vec<LeftOutError>, DataError> {
    let [left_out, kernel, topology, system, rows, error, worst_size, worst_error] =
        sheet.find(["left_out", "kernel", "topology", "system", "rows", "error", "worst_size", "worst_error"])?;
    let mut errors = Vec::with_capacity(sheet.rows.len());
    for row in &sheet.rows {
        let cell = |column| sheet.cell(row, column);
        let whole = |column| cell(column).required("a whole number of 1 or more", |&n: &u64| n > 0);
        let number = |column| cell(column).required("a number of 0 or more", |n: &f64| n.is_finite() && *n >= 0.0);
        errors.push(LeftOutError {
            left_out: cell(left_out).filled()?.to_owned(),
            kernel: cell(kernel).fused_kernel()?.to_owned(),
            topology: cell(topology).filled()?.to_owned(),
            system: cell(system).filled()?.to_owned(),
            rows: whole(rows)?,
            error: number(error)?,
            worst_size: whole(worst_size)?,
            worst_error: number(worst_error)?,
        });
    }
    Ok(errors)
}

pub(super) fn fit_parameters(sheet: &Sheet) -> Result<Vec<FitParameter>, DataError> {
    let [parameter, machines, start, low, high] = sheet.find(["parameter", "machines", "start", "low", "high"])?;
    let mut parameters = Vec::with_capacity(sheet.rows.len());
    for row in &sheet.rows {
        let cell = |column| sheet.cell(row, column);
        let number = |column| cell(column).required("a number from 0 to 1e6", |n| (0.0..=1e6).contains(n));
        let found = FitParameter {
            parameter: cell(parameter).filled()?.to_owned(),
            machines: cell(machines).filled()?.split_whitespace().map(str::to_owned).collect(),
            start: number(start)?,
            low: number(low)?,
            high: number(high)?,
        };
        if !(found.low <= found.start && found.start <= found.high && found.low < found.high) {
            return Err(cell(start).refuse(format!("a number from low {} to high {}", found.low, found.high)));
        }
        parameters.push(found);
    }
    Ok(parameters)
}
