//! RDMA devices as the kernel describes them in sysfs; no library is asked.

use serde::Serialize;
use std::fs;
use std::path::Path;

/// Where the kernel describes RDMA devices.
pub const SYSFS: &str = "/sys/class/infiniband";

/// An RDMA device.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct RdmaDevice {
    /// Name.
    pub name: String,
    /// Kernel driver: mlx5_core, efa; none for software devices.
    pub driver: Option<String>,
    /// Whether it is a program of the kernel (Soft-RoCE, Soft-iWARP), not hardware.
    pub software: bool,
    /// Its place in the tree of PCIe bridges: the kernel's path of the device.
    pub pci_path: Option<String>,
    /// NUMA node of its slot.
    pub numa_node: Option<u32>,
    /// Ports.
    pub ports: Vec<RdmaPort>,
    /// The transport that would use it; none without an active port.
    pub transport: Option<&'static str>,
}

/// A port of an RDMA device.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct RdmaPort {
    /// Number, from 1.
    pub number: u8,
    /// InfiniBand, Ethernet or unspecified.
    pub link_layer: Option<String>,
    /// State.
    pub state: Option<String>,
    /// Rate, as the kernel words it.
    pub rate: Option<String>,
    /// Addresses that are not empty.
    pub gids: Vec<Gid>,
    /// Index of the address that `verbs-rc` takes: the first RoCE v2 one over IPv4, else the first RoCE v2 one, else 0.
    pub gid_index: u8,
}

/// An address of a port.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Gid {
    /// Index.
    pub index: u8,
    /// Address in eight groups.
    pub gid: String,
    /// IB/RoCE v1 or RoCE v2.
    pub kind: String,
}

impl RdmaPort {
    /// Whether it is up.
    pub fn is_active(&self) -> bool {
        self.state.as_ref().is_some_and(|state| state.contains("ACTIVE"))
    }
}

fn text(path: &Path) -> Option<String> {
    fs::read_to_string(path).ok().map(|text| text.trim().to_owned()).filter(|text| !text.is_empty())
}

/// Names of a directory's entries, sorted.
fn names(path: &Path) -> Vec<String> {
    let entries = fs::read_dir(path).into_iter().flatten().filter_map(Result::ok);
    let mut names: Vec<String> = entries.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect();
    names.sort();
    names
}

fn port(path: &Path, number: u8) -> RdmaPort {
    let mut gids: Vec<Gid> = names(&path.join("gids"))
        .into_iter()
        .filter_map(|name| {
            let gid = text(&path.join("gids").join(&name)).filter(|gid| gid.chars().any(|c| !"0:".contains(c)))?;
            let kind = text(&path.join("gid_attrs/types").join(&name)).unwrap_or_default();
            Some(Gid { index: name.parse().ok()?, gid, kind })
        })
        .collect();
    gids.sort_by_key(|gid| gid.index);
    let v2 = |gid: &&Gid| gid.kind == "RoCE v2";
    let ipv4 = |gid: &&Gid| gid.gid.starts_with("0000:0000:0000:0000:0000:ffff:");
    let chosen = gids.iter().filter(v2).find(ipv4).or_else(|| gids.iter().find(v2));
    RdmaPort {
        number,
        link_layer: text(&path.join("link_layer")),
        state: text(&path.join("state")),
        rate: text(&path.join("rate")),
        gid_index: chosen.map_or(0, |gid| gid.index),
        gids,
    }
}

/// The devices below a directory with the layout of `/sys/class/infiniband`, by name.
pub fn devices(root: &Path) -> Vec<RdmaDevice> {
    let device = |name: String| {
        let path = root.join(&name);
        let ports = names(&path.join("ports"));
        let numbers = ports.iter().filter_map(|name| name.parse::<u8>().ok());
        let ports: Vec<RdmaPort> =
            numbers.map(|number| port(&path.join("ports").join(number.to_string()), number)).collect();
        let driver = fs::canonicalize(path.join("device/driver")).ok();
        let driver = driver.and_then(|driver| driver.file_name().map(|name| name.to_string_lossy().into_owned()));
        let numa_node = text(&path.join("device/numa_node")).and_then(|node| node.parse().ok());
        let pci_path = fs::canonicalize(path.join("device")).ok().map(|path| path.to_string_lossy().into_owned());
        let software =
            text(&path.join("node_desc")).is_some_and(|text| ["rxe", "siw"].iter().any(|kind| text.starts_with(kind)));
        let srd = driver.as_deref() == Some("efa");
        let transport = ports.iter().any(RdmaPort::is_active).then_some(if srd { "verbs-srd" } else { "verbs-rc" });
        RdmaDevice { name, driver, software, pci_path, numa_node, ports, transport }
    };
    names(root).into_iter().map(device).collect()
}

/// Where a rank is, for its distance to NICs.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Seat {
    /// The kernel's path of its GPU's PCIe device.
    pub pci_path: Option<String>,
    /// NUMA node of its GPU, or of the CPU that it runs on.
    pub numa_node: Option<u32>,
    /// Its number among the ranks of its node.
    pub index: usize,
}

impl Seat {
    /// A rank whose memory is the host's: near to the first CPU that it may run on.
    pub fn of_cpu(index: usize) -> Self {
        let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
        let allowed = status.lines().find_map(|line| line.strip_prefix("Cpus_allowed_list:")).unwrap_or_default();
        let cpu = cpus(allowed).next();
        let nodes = Path::new("/sys/devices/system/node");
        let numbers = names(nodes).into_iter().filter_map(|name| name.strip_prefix("node")?.parse::<u32>().ok());
        let has = |node: &u32| {
            let list = text(&nodes.join(format!("node{node}/cpulist"))).unwrap_or_default();
            cpu.is_some_and(|cpu| cpus(&list).any(|known| known == cpu))
        };
        Self { pci_path: None, numa_node: numbers.into_iter().find(has), index }
    }

    /// A rank with a GPU, by the PCIe address that the driver tells, `0000:17:00.0`.
    pub fn of_gpu(bus_id: &str, index: usize) -> Self {
        let path = Path::new("/sys/bus/pci/devices").join(bus_id.to_lowercase());
        let numa_node = text(&path.join("numa_node")).and_then(|node| node.parse().ok());
        let pci_path = fs::canonicalize(&path).ok().map(|path| path.to_string_lossy().into_owned());
        Self { pci_path, numa_node, index }
    }

    /// How far a device is: PCIe bridges in common, most first; then whether it is of another NUMA node.
    fn distance(&self, device: &RdmaDevice) -> (std::cmp::Reverse<usize>, bool) {
        let common = match (&self.pci_path, &device.pci_path) {
            (Some(mine), Some(its)) => mine.split('/').zip(its.split('/')).take_while(|(a, b)| a == b).count(),
            _ => 0,
        };
        (std::cmp::Reverse(common), self.numa_node != device.numa_node)
    }
}

/// The numbers of a list as `0-3,8`.
fn cpus(list: &str) -> impl Iterator<Item = u32> {
    let range = |part: &str| {
        let (from, to) = part.split_once('-').unwrap_or((part, part));
        Some(from.trim().parse().ok()?..=to.trim().parse().ok()?)
    };
    list.split(',').filter_map(range).flatten().collect::<Vec<u32>>().into_iter()
}

/// The names of the `rails` devices that a rank takes for a transport, the nearest first. Ranks of a node to which
/// devices are equally near take turns by their index.
///
/// # Errors
/// What is missing.
pub fn nearest(devices: &[RdmaDevice], transport: &str, seat: &Seat, rails: usize) -> Result<Vec<String>, String> {
    let mut usable: Vec<&RdmaDevice> = devices.iter().filter(|device| device.transport == Some(transport)).collect();
    if usable.len() < rails.max(1) {
        return Err(match (devices.len(), usable.len()) {
            (0, _) => "no RDMA device on this machine".to_owned(),
            (_, 0) => format!("no RDMA device with an active port for {transport}; `tilewire doctor` lists all"),
            (_, n) => format!("{rails} rails need as many NICs with an active port for {transport}, there are {n}"),
        });
    }
    usable.sort_by_key(|device| (seat.distance(device), device.name.clone()));
    let equal = usable.iter().take_while(|device| seat.distance(device) == seat.distance(usable[0])).count();
    if equal >= rails {
        usable[..equal].rotate_left(seat.index * rails % equal);
    }
    Ok(usable[..rails].iter().map(|device| device.name.clone()).collect())
}

/// What to say of a device that is not there.
pub fn no_such(wanted: &str, names: &[String]) -> String {
    let there = if names.is_empty() { "none".to_owned() } else { names.join(", ") };
    format!("no RDMA device {wanted}; there are: {there}")
}

#[cfg(test)]
mod tests {
    use super::*;

    const LINK: &str = "fe80:0000:0000:0000:5054:00ff:fe00:0001";
    const IPV4: &str = "0000:0000:0000:0000:0000:ffff:0a32:0001";
    const NONE: &str = "0000:0000:0000:0000:0000:0000:0000:0000";

    #[test]
    fn devices_ports_and_addresses_are_read_from_sysfs() {
        assert_eq!(devices(Path::new("/no/such/directory")), []);
        let root = std::env::temp_dir().join(format!("tilewire-rdma-{}", std::process::id()));
        let write = |file: &str, text: &str| {
            let path = root.join("mlx5_0/ports/1").join(file);
            fs::create_dir_all(path.parent().expect("a parent")).expect("a directory");
            fs::write(path, format!("{text}\n")).expect("a file");
        };
        write("link_layer", "Ethernet");
        write("rate", "400 Gb/sec (4X NDR)");
        write("state", "1: DOWN");
        for (index, kind, gid) in [
            (0, "IB/RoCE v1", LINK),
            (1, "RoCE v2", LINK),
            (2, "IB/RoCE v1", IPV4),
            (3, "RoCE v2", IPV4),
            (4, "", NONE),
        ] {
            write(&format!("gids/{index}"), gid);
            write(&format!("gid_attrs/types/{index}"), kind);
        }
        let [down] = &devices(&root)[..] else { panic!("one device") };
        assert_eq!((down.name.as_str(), down.transport, down.driver.clone()), ("mlx5_0", None, None));
        write("state", "4: ACTIVE");
        let [up] = &devices(&root)[..] else { panic!("one device") };
        assert_eq!(up.transport, Some("verbs-rc"));
        let port = &up.ports[0];
        assert_eq!((port.number, port.gids.len(), port.gid_index), (1, 4, 3));
        assert_eq!(port.rate.as_deref(), Some("400 Gb/sec (4X NDR)"));
        write("gids/3", LINK);
        assert_eq!(devices(&root)[0].ports[0].gid_index, 1, "without IPv4 the first RoCE v2 one");
        fs::remove_dir_all(&root).expect("the directory of this test");
    }

    fn device(name: &str, path: &str, numa: u32) -> RdmaDevice {
        RdmaDevice {
            name: name.to_owned(),
            driver: None,
            software: false,
            pci_path: Some(path.to_owned()),
            numa_node: Some(numa),
            ports: Vec::new(),
            transport: Some("verbs-rc"),
        }
    }

    #[test]
    fn the_nearest_devices_are_taken_and_equals_take_turns() {
        let devices = [
            device("a", "/sys/devices/pci0000:80/0000:80:01.0/0000:82:00.0", 1),
            device("b", "/sys/devices/pci0000:10/0000:10:01.0/0000:12:00.0", 0),
            device("c", "/sys/devices/pci0000:10/0000:10:02.0/0000:14:00.0", 0),
            device("d", "/sys/devices/pci0000:20/0000:20:02.0/0000:24:00.0", 0),
        ];
        let of = |path: Option<&str>, numa, index, rails| {
            let seat = Seat { pci_path: path.map(str::to_owned), numa_node: numa, index };
            nearest(&devices, "verbs-rc", &seat, rails)
        };
        let names = |names: &[&str]| Ok(names.iter().map(|&name| name.to_owned()).collect::<Vec<_>>());
        let gpu = Some("/sys/devices/pci0000:10/0000:10:02.0/0000:13:00.0");
        assert_eq!(of(gpu, Some(0), 0, 1), names(&["c"]), "behind the same bridge");
        assert_eq!(of(gpu, Some(0), 5, 1), names(&["c"]), "nothing to share");
        assert_eq!(of(gpu, Some(0), 0, 3), names(&["c", "b", "d"]), "then the same root, then the same NUMA node");
        assert_eq!(of(None, Some(1), 0, 1), names(&["a"]));
        let turns: Vec<_> = (0..4).map(|index| of(None, Some(0), index, 1)).collect();
        assert_eq!(turns, [names(&["b"]), names(&["c"]), names(&["d"]), names(&["b"])]);
        assert_eq!(of(None, Some(0), 1, 2), names(&["d", "b"]));
        assert!(of(None, None, 0, 5).is_err_and(|text| text.contains("there are 4")));
        assert!(nearest(&devices, "verbs-srd", &Seat::default(), 1).is_err());
        assert_eq!(cpus("0-2,8").collect::<Vec<_>>(), [0, 1, 2, 8]);
    }
}
