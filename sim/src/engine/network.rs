//! Which resources the flows of each rank cross.

use crate::compile::{Compiled, Demand, NONE, ResourceKind};
use crate::share::Sharing;
use tilewire_kernels::{Offset, Rank};

/// Resources of all ranks, and the classes of flows that cross them.
pub(super) fn new_sharing(c: &Compiled) -> Sharing {
    let per_rank = ResourceKind::count(c.times.rails);
    let own = c.ranks.iter().flat_map(|_| c.capacities.iter().copied());
    let leaves = c.leaves.into_iter().flat_map(|leaves| {
        let links = 2 * u32::from(c.folded.nodes).div_ceil(leaves.nodes) * c.times.rails;
        std::iter::repeat_n((leaves.link, 0), links as usize)
    });
    let mut sharing = Sharing::new(own.chain(leaves));
    let mixed = main_only(c);
    for (owner, &rank) in c.ranks.iter().enumerate() {
        for (class, &mixed) in c.classes.iter().zip(&mixed) {
            let own = class.iter().map(|&(offset, kind, demand)| {
                let target = c.folded.number(c.folded.at(rank, offset)) as u32;
                (target * per_rank + kind.index(c.times.rails), demand)
            });
            sharing.add_class(owner as u32, mixed, own.chain(leaf_links(c, rank, class)));
        }
    }
    sharing
}

/// Classes only of main flows of tasks. Their ends free workers, which go on in an order of their own; ends of outputs and
/// messages count in the order in which they come.
fn main_only(c: &Compiled) -> Vec<bool> {
    let mut main_only = vec![true; c.classes.len()];
    let outputs = c.costs.iter().flat_map(|record| &record.forms).flat_map(|cost| [cost.out, cost.deferred]);
    let messages = c.programs.iter().flat_map(|program| &program.puts).map(|put| put.flow);
    for flow in outputs.chain(messages).filter(|flow| flow.class != NONE) {
        main_only[flow.class as usize] = false;
    }
    main_only
}

/// The uplink and the downlink that a class of a rank crosses between leaf switches.
fn leaf_links(c: &Compiled, rank: Rank, class: &[Demand]) -> impl Iterator<Item = (u32, u64)> + use<> {
    let first = c.ranks.len() as u32 * ResourceKind::count(c.times.rails);
    let crossed = c.leaves.zip(c.leaf_demand(class)).and_then(|(leaves, (dn, rail, demand))| {
        let target = c.folded.at(rank, Offset::node(dn));
        let [from, to] = [rank, target].map(|rank| u32::from(rank.node) / leaves.nodes);
        let link = |leaf: u32, down: u32| (first + 2 * (leaf * c.times.rails + u32::from(rail)) + down, demand);
        (from != to).then(|| [link(from, 0), link(to, 1)])
    });
    crossed.into_iter().flatten()
}
