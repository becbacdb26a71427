//! RDMA devices as the kernel describes them in sysfs; no library is asked.

use serde::Serialize;
use std::fs;
use std::path::Path;

/// An RDMA device.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct RdmaDevice {
    /// Name.
    pub name: String,
    /// Kernel driver: mlx5_core, efa; none for software devices.
    pub driver: Option<String>,
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
        let srd = driver.as_deref() == Some("efa");
        let transport = ports.iter().any(RdmaPort::is_active).then_some(if srd { "verbs-srd" } else { "verbs-rc" });
        RdmaDevice { name, driver, numa_node, ports, transport }
    };
    names(root).into_iter().map(device).collect()
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
}
