//! Cases of the GEMM family by name, shape and options, and the variants that every suite visits.

use tilewire_kernels::{BuildError, Cluster, Fabric, OptionSet, Problem, Schedule, Spec, kernel};

/// What a test asks for.
pub struct Case {
    pub kernel: &'static str,
    pub set: OptionSet,
    pub cluster: (u16, u16),
    pub fabric: Fabric,
    /// m, n, k of the GEMM of a rank.
    pub shape: [u64; 3],
    pub options: Vec<(&'static str, &'static str)>,
}

/// Options that make tiles of 16 x 32 x 16.
pub const SMALL_TILES: [(&str, &str); 3] = [("tile_m", "16"), ("tile_n", "32"), ("tile_k", "16")];

impl Case {
    pub fn new(kernel: &'static str, set: OptionSet, cluster: (u16, u16), shape: [u64; 3]) -> Self {
        Self { kernel, set, cluster, fabric: Fabric::IbRc, shape, options: Vec::new() }
    }

    pub fn with(mut self, options: &[(&'static str, &'static str)]) -> Self {
        self.options.extend(options);
        self
    }

    pub fn spec(&self) -> Spec {
        let [m, n, k] = self.shape;
        let problem = Problem::Gemm { m, n, k };
        let cluster = Cluster { nodes: self.cluster.0, gpus_per_node: self.cluster.1 };
        let mut options = kernel(self.kernel).expect("in the registry").options(self.set, &problem, cluster);
        for (name, text) in &self.options {
            options.set(name, text).expect("a legal option");
        }
        Spec { problem, cluster, fabric: self.fabric, options }
    }

    pub fn build(&self) -> Schedule {
        self.try_build().unwrap_or_else(|error| panic!("{error}"))
    }

    pub fn try_build(&self) -> Result<Schedule, BuildError> {
        kernel(self.kernel).expect("in the registry").build(&self.spec())
    }
}

type Variant = &'static [(&'static str, &'static str)];

const AG_GEMM: &[Variant] = &[
    &[],
    &[("nvls", "true")],
    &[("nvls", "true"), ("row_order", "absolute"), ("own_rows", "gathered")],
    &[("nvls", "false"), ("copy_targets", "all")],
    &[("nvls", "false"), ("copy_targets", "each"), ("forward", "on_arrival"), ("own_rows", "gathered")],
    &[("exchange", "ring"), ("forward", "on_arrival")],
    &[("exchange", "ring"), ("forward", "after_publish"), ("copy_targets", "all"), ("remote_ready", "k_chunk")],
    &[("exchange", "ring"), ("forward", "after_publish"), ("copy_targets", "all"), ("own_rows", "direct")],
    &[("exchange", "ring"), ("first_hop", "send_role"), ("copy_targets", "all"), ("remote_order", "arrival")],
    &[("exchange", "direct"), ("first_hop", "prologue"), ("phase_gate", "true")],
    &[("local_ready", "row_unit"), ("remote_ready", "row_unit")],
    &[("copy_claim", "ready"), ("phase_gate", "true"), ("unit_tiles", "2"), ("puts_per_unit", "8")],
    &[("compute_claim", "ticket"), ("recycle", "true")],
    &[("super_m", "1"), ("row_order", "absolute"), ("unit_tiles", "1")],
];

/// Schedules without stores that open chunks ahead of adds refuse any other lead.
const NO_LEAD: (&str, &str) = ("open_lead_tiles", "0");

const GEMM_AR: &[Variant] = &[
    &[],
    &[("exchange", "scatter_gather")],
    &[("exchange", "scatter_gather"), ("publish", "copy")],
    &[("exchange", "direct"), ("publish", "copy"), ("nvls", "true")],
    &[("node_sum", "pull"), NO_LEAD, ("nvls", "false")],
    &[("node_sum", "pull"), NO_LEAD, ("nvls", "true"), ("exchange", "scatter_gather")],
    &[("node_sum", "pull"), NO_LEAD, ("double_store", "true"), ("exchange", "scatter_gather"), ("publish", "copy")],
    &[("node_sum", "add"), NO_LEAD, ("slice_order", "absolute"), ("interleave", "row")],
    &[("super_m", "3"), ("interleave", "row"), ("exchange", "scatter_gather")],
    &[("node_sum", "add"), NO_LEAD, ("exchange", "scatter_gather")],
    &[("node_sum", "add"), ("open_lead_tiles", "1"), ("slice_order", "relative"), ("chunk_tiles", "1")],
    &[("node_sum", "add"), ("open_lead_tiles", "4096"), ("slice_order", "relative"), ("interleave", "row")],
    &[("intra_order", "in_order"), ("send_order", "in_order"), ("reduce_order", "in_order")],
    &[("end_sync", "true"), ("chunk_tiles", "1"), ("exchange", "scatter_gather")],
    &[("end_sync", "true"), ("publish", "copy"), ("chunk_tiles", "2"), ("nvls", "false")],
];

const GEMM_RS: &[Variant] = &[
    &[],
    &[("staging", "owner_store"), NO_LEAD],
    &[("staging", "owner_store"), ("open_lead_tiles", "1")],
    &[("staging", "owner_store"), ("open_lead_tiles", "40"), ("super_m", "2")],
    &[("staging", "owner_store"), ("open_lead_tiles", "1"), ("tile_order", "row_block"), ("output", "per_node")],
    &[("staging", "owner_store"), ("open_lead_tiles", "4096"), ("chunk_tiles", "1"), ("send_order", "in_order")],
];

/// Both sets of a kernel with every variant on small clusters; tiles are 16 x 32 x 16.
pub fn variants(kernel: &'static str, fabric: Fabric) -> Vec<Case> {
    let list = match kernel {
        "ag_gemm" => AG_GEMM,
        "gemm_ar" => GEMM_AR,
        _ => GEMM_RS,
    };
    let mut cases = Vec::new();
    for (nodes, gpus) in [(1, 1), (1, 2), (1, 4), (2, 1), (2, 2), (2, 4), (3, 2), (4, 1), (3, 3)] {
        let (n, g) = (u64::from(nodes), u64::from(gpus));
        let (shape, chunk) = match kernel {
            "ag_gemm" => ([64 * n * g, 64, 128], ("chunk_k_steps", "2")),
            "gemm_ar" => ([64 * g, 128 * n, 32], ("chunk_tiles", "4")),
            // Several chunks for every rank to sum, so that a lead may be shorter than the list.
            _ => ([32 * n * g, 256, 32], ("chunk_tiles", "4")),
        };
        for set in [OptionSet::Published, OptionSet::Tilewire] {
            let leads = |&(name, value): &(&str, &str)| name == NO_LEAD.0 && value != NO_LEAD.1;
            for variant in list.iter().filter(|variant| gpus > 1 || !variant.iter().any(leads)) {
                let case = Case::new(kernel, set, (nodes, gpus), shape).with(&SMALL_TILES).with(&[chunk]).with(variant);
                cases.push(Case { fabric, ..case });
            }
        }
    }
    cases
}
