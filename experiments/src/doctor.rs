//! `doctor`: what this machine has, and what each missing part disables.

use crate::cli::DoctorArgs;
use std::fmt::Write as _;
use tilewire_hw::probe::rdma::{Seat, nearest};
use tilewire_hw::probe::{Driver, Gpu, Library, Probe, probe};

/// One part of the machine.
struct Part {
    name: &'static str,
    present: bool,
    found: String,
    without: &'static str,
}

/// Runs the command; returns what it prints.
pub fn run(args: &DoctorArgs) -> String {
    let probe = probe();
    if args.json {
        return serde_json::to_string_pretty(&probe).expect("a probe has only plain fields") + "\n";
    }
    text(&parts(&probe))
}

fn parts(probe: &Probe) -> Vec<Part> {
    let (driver, gpus, links) = match &probe.driver {
        Driver::Missing => ((false, "CUDA driver not found (libcuda.so.1)".into()), vec![], vec![]),
        Driver::Failed { call, code } => {
            ((false, format!("CUDA driver found, {call} failed with {code}")), vec![], vec![])
        }
        Driver::Present { cuda_version, module, gpus, peers } => {
            let module = module.as_ref().map_or_else(String::new, |module| format!(" {module}"));
            let (major, minor) = (cuda_version / 1000, cuda_version % 1000 / 10);
            ((true, format!("CUDA driver{module}, up to CUDA {major}.{minor}")), gpus.clone(), peers.clone())
        }
    };
    let hopper = gpus.iter().filter(|gpu| gpu.capability == [9, 0]).count();
    let gpu_text = if gpus.is_empty() {
        "no GPU".to_owned()
    } else {
        let one = |gpu: &Gpu| {
            let [major, minor] = gpu.capability;
            let gib = gpu.memory_bytes as f64 / f64::from(1 << 30);
            let rdma = if gpu.gpu_direct_rdma && gpu.dma_buf { ", GPUDirect RDMA by dmabuf" } else { "" };
            let nvls = if gpu.multicast { ", multicast" } else { "" };
            format!("{} (sm_{major}{minor}, {} SMs, {gib:.0} GiB{rdma}{nvls})", gpu.name, gpu.sms)
        };
        let mut lines: Vec<String> = gpus.iter().map(one).collect();
        // Equal GPUs in one line.
        let first = lines[0].clone();
        if lines.iter().all(|line| *line == first) && lines.len() > 1 {
            lines = vec![format!("{} x {first}", gpus.len())];
        }
        lines.join("; ")
    };
    let nvlink = links.iter().filter(|peer| peer.access && peer.atomics).count();
    let link_text = match (gpus.len(), nvlink) {
        (0 | 1, _) => "no second GPU".to_owned(),
        (_, 0) => "GPUs without NVLink between them".to_owned(),
        (_, n) => format!("{n} of {} ordered pairs reach each other with loads, stores and atomics", links.len()),
    };
    let library = |library: &Library, name: &str| match library {
        Library::Missing => format!("{name} not found"),
        Library::Present { version: Some(version) } => format!("{name} {version}"),
        Library::Present { version: None } => format!("{name} found"),
    };
    let active = |driver: &str| probe.rdma.iter().filter(|device| device.driver.as_deref() == Some(driver)).count();
    let rdma_text = if probe.rdma.is_empty() {
        "no RDMA device".to_owned()
    } else {
        let one = |device: &tilewire_hw::probe::RdmaDevice| {
            let port = |port: &tilewire_hw::probe::rdma::RdmaPort| {
                let words: Vec<&str> =
                    [&port.link_layer, &port.rate, &port.state].into_iter().flatten().map(String::as_str).collect();
                let gid = port.gids.iter().find(|gid| gid.index == port.gid_index);
                let gid = gid
                    .map_or_else(|| "no GID".to_owned(), |gid| format!("GID {} {} {}", gid.index, gid.kind, gid.gid));
                format!("port {} {}, {gid}", port.number, words.join(", "))
            };
            let ports: Vec<String> = device.ports.iter().map(port).collect();
            let driver = if device.software { "software" } else { device.driver.as_deref().unwrap_or("no driver") };
            let use_of = device.transport.map_or_else(|| "no active port".to_owned(), |name| format!("for {name}"));
            format!("{} ({driver}; {}; {use_of})", device.name, ports.join("; "))
        };
        probe.rdma.iter().map(one).collect::<Vec<_>>().join("; ")
    };
    let present = |library: &Library| *library != Library::Missing;
    let (any_wire, wires) = wires(probe, &gpus);
    vec![
        Part { name: "driver", present: driver.0, found: driver.1, without: "measure and calibrate" },
        Part {
            name: "gpu",
            present: hopper > 0,
            found: gpu_text,
            without: "measure and calibrate, which need a GPU of compute capability 9.0",
        },
        Part {
            name: "nvlink",
            present: nvlink > 0,
            found: link_text,
            without: "measuring in cluster mode; mirror mode needs one GPU only",
        },
        Part {
            name: "nvrtc",
            present: present(&probe.nvrtc),
            found: library(&probe.nvrtc, "NVRTC"),
            without: "compiling the device interpreter, so measure and calibrate",
        },
        Part {
            name: "verbs",
            present: present(&probe.verbs),
            found: library(&probe.verbs, "libibverbs"),
            without: "the transports verbs-rc and verbs-srd; loopback needs neither",
        },
        Part {
            name: "rdma",
            present: !probe.rdma.is_empty(),
            found: rdma_text,
            without: "measuring between nodes; loopback paces copies on one host instead",
        },
        Part {
            name: "efa",
            present: present(&probe.efa) && active("efa") > 0,
            found: format!("{}, {} EFA device(s)", library(&probe.efa, "libefa"), active("efa")),
            without: "the transport verbs-srd",
        },
        Part {
            name: "ranks",
            present: any_wire,
            found: wires,
            without: "puts over a NIC; ranks of one host use loopback",
        },
    ]
}

/// What would carry the puts of each rank here, one for each GPU, or one on the CPU where there is none; and whether any
/// rank has a NIC.
fn wires(probe: &Probe, gpus: &[Gpu]) -> (bool, String) {
    let active: Vec<&str> = probe.rdma.iter().filter_map(|device| device.transport).collect();
    let transport = if active.contains(&"verbs-srd") { "verbs-srd" } else { "verbs-rc" };
    let wire = |seat: &Seat| nearest(&probe.rdma, transport, seat, 1).ok().and_then(|names| names.into_iter().next());
    if gpus.is_empty() {
        let seat = Seat::of_cpu(0);
        return match wire(&seat) {
            Some(nic) => (true, format!("a rank on the CPU: {transport} by {nic}, host memory")),
            None => (false, "a rank on the CPU: loopback".to_owned()),
        };
    }
    let rank = |(index, gpu): (usize, &Gpu)| {
        let memory = if gpu.dma_buf { "dmabuf, else peermem" } else { "peermem" };
        match wire(&Seat::of_gpu(&gpu.bus_id, index)) {
            Some(nic) => format!(
                "GPU {index}: {transport} by {nic}, memory by {memory}, else a bounce buffer (no GPU has met a NIC with this build)"
            ),
            None => format!("GPU {index}: loopback"),
        }
    };
    let texts: Vec<String> = gpus.iter().enumerate().map(rank).collect();
    (!active.is_empty(), texts.join("; "))
}

fn text(parts: &[Part]) -> String {
    let mut text = String::new();
    for part in parts {
        let mark = if part.present { "yes" } else { "no " };
        let _ = writeln!(text, "{:7} {mark}  {}", part.name, part.found);
        if !part.present {
            let _ = writeln!(text, "             disables {}", part.without);
        }
    }
    text += "\nOnly measure and calibrate need any of these\n";
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bare_machine_is_told_what_it_lacks() {
        let bare = Probe {
            driver: Driver::Missing,
            nvrtc: Library::Missing,
            verbs: Library::Missing,
            efa: Library::Missing,
            rdma: Vec::new(),
        };
        let text = text(&parts(&bare));
        assert!(text.contains("driver  no   CUDA driver not found (libcuda.so.1)"), "{text}");
        assert!(text.contains("ranks   no   a rank on the CPU: loopback"), "{text}");
        assert_eq!(text.matches("disables").count(), 8, "{text}");
    }
}
