//! Where cases take their data from, and the machine that a cluster's name stands for.

use super::{Part, Refusal, ResolveError};
use crate::data::{Data, DataError, read_machine};
use crate::shape;
use std::fmt;
use std::path::{Path, PathBuf};
use tilewire_kernels::Cluster;
use tilewire_sim::Machine;
use tilewire_sim::machine::PeerPath;

/// Nodes, and GPUs per node, of a cluster at most.
const MAX_SIDE: u16 = 1024;

/// Where machines come from: the data directory, or one file that replaces them.
pub struct Source {
    /// Data directory.
    pub data: Data,
    /// `--machine`.
    file: Option<(PathBuf, Machine, String)>,
}

/// A cluster and the machine that it is made of.
#[derive(Debug)]
pub struct Target {
    /// Nodes and GPUs.
    pub cluster: Cluster,
    /// Machine.
    pub machine: Machine,
}

impl fmt::Display for Target {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}-{}", self.cluster, self.machine.name)
    }
}

impl Source {
    /// The data directory and machine file that the flags name.
    ///
    /// # Errors
    /// [`DataError`] when one of them cannot be read.
    pub fn new(data: Option<&Path>, machine: Option<&Path>) -> Result<Self, DataError> {
        let data = Data::new(data)?;
        let read = |file: &Path| read_machine(file, &data).map(|(machine, text)| (file.to_owned(), machine, text));
        let file = machine.map(read).transpose()?;
        Ok(Self { data, file })
    }

    /// The machine of the file that replaces all, or else this one.
    ///
    /// # Errors
    /// [`DataError`] when it cannot be read.
    pub fn machine_or(&self, name: &str) -> Result<Machine, DataError> {
        self.file.as_ref().map_or_else(|| self.data.machine(name), |(_, machine, _)| Ok(machine.clone()))
    }

    /// The same data with this machine in place of all.
    pub fn with(&self, machine: Machine) -> Self {
        Self { data: self.data.clone(), file: Some((PathBuf::new(), machine, String::new())) }
    }

    /// The text of a machine's file.
    ///
    /// # Errors
    /// [`DataError`] when it cannot be read.
    pub fn machine_text(&self, machine: &Machine) -> Result<String, DataError> {
        match &self.file {
            Some((_, known, text)) if known.name == machine.name => Ok(text.clone()),
            _ => self.data.machine_text(&machine.name),
        }
    }

    /// The cluster that `NxG-MACHINE` names.
    pub(super) fn target(&self, text: &str) -> Result<Target, ResolveError> {
        let refuse = |problem: String| Refusal::new(Part::Cluster, problem);
        let form =
            || refuse(format!("\"{text}\", allowed: NxG-MACHINE as in 2x8-h200-efa, sides from 1 to {MAX_SIDE}"));
        let (size, name) = text.split_once('-').unwrap_or((text, ""));
        let (nodes, gpus) = size.split_once('x').ok_or_else(form)?;
        let side = |text: &str| {
            let side = shape::whole(text).and_then(|side| u16::try_from(side).ok());
            side.filter(|side| (1..=MAX_SIDE).contains(side)).ok_or_else(form)
        };
        let cluster = Cluster { nodes: side(nodes)?, gpus_per_node: side(gpus)? };
        let machine = match &self.file {
            Some((_, machine, _)) if name.is_empty() || name == machine.name => machine.clone(),
            Some((file, machine, _)) => {
                return Err(refuse(format!(
                    "\"{text}\", but --machine {} is \"{}\"; write {size} or {size}-{0}",
                    file.display(),
                    machine.name
                ))
                .into());
            }
            None => self.named(cluster, size, name)?,
        };
        fits(cluster, &machine).map_err(refuse)?;
        Ok(Target { cluster, machine })
    }

    fn named(&self, cluster: Cluster, size: &str, name: &str) -> Result<Machine, ResolveError> {
        let names = self.data.machine_names()?;
        let within_node = format!("{name}-nvlink");
        if names.iter().any(|known| known == name) {
            return Ok(self.data.machine(name)?);
        }
        if cluster.nodes == 1 && names.contains(&within_node) {
            return Ok(self.data.machine(&within_node)?);
        }
        let fitting = |known: &&String| self.data.machine(known).is_ok_and(|machine| fits(cluster, &machine).is_ok());
        let spelled: Vec<String> = names.iter().filter(fitting).map(|known| format!("{size}-{known}")).collect();
        let allowed = if spelled.is_empty() { format!("none for {cluster}") } else { spelled.join(", ") };
        Err(Refusal::new(Part::Cluster, format!("no machine \"{name}\", allowed: {allowed}")).into())
    }
}

/// Whether a machine can form a cluster.
fn fits(cluster: Cluster, machine: &Machine) -> Result<(), String> {
    let domain = machine.nvlink.domain_gpus.value;
    if machine.peer_path == PeerPath::Nvlink && f64::from(cluster.gpus_per_node) > domain {
        return Err(format!("{cluster} needs {} GPUs per node, {} has {domain}", cluster.gpus_per_node, machine.name));
    }
    // Machines without a network are named for the link that they have.
    if machine.name.ends_with("-nvlink") && cluster.nodes > 1 {
        return Err(format!(
            "{cluster} needs a network, {} is one node; name a fabric, as in {cluster}-h200-cx7 or {cluster}-h200-efa",
            machine.name
        ));
    }
    Ok(())
}
