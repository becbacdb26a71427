//! The next event of every rank: a winner tree over their next times.
//!
//! Each rank keeps its own few sources of events (classes of flows, a small heap of timers); the tree finds the ranks
//! whose next time is the smallest. An update costs the logarithm of the number of ranks, whatever the number of live
//! tasks, and ties come out in rank order.

use crate::share::NEVER;

/// Winner tree over `n` times, all [`NEVER`] at first.
#[derive(Default)]
pub struct Tree {
    leaves: usize,
    nodes: Vec<u64>,
}

impl Tree {
    /// A tree for `n` ranks.
    pub fn new(n: usize) -> Self {
        let mut tree = Self::default();
        tree.reset(n);
        tree
    }

    /// Forgets all times; `n` ranks.
    pub fn reset(&mut self, n: usize) {
        self.leaves = n.next_power_of_two();
        self.nodes.clear();
        self.nodes.resize(2 * self.leaves, NEVER);
    }

    /// The smallest time.
    pub fn min(&self) -> u64 {
        self.nodes[1]
    }

    /// The time of a rank.
    pub fn get(&self, rank: usize) -> u64 {
        self.nodes[self.leaves + rank]
    }

    /// Sets the time of a rank.
    pub fn set(&mut self, rank: usize, time: u64) {
        let mut node = self.leaves + rank;
        if self.nodes[node] == time {
            return;
        }
        self.nodes[node] = time;
        while node > 1 {
            node /= 2;
            let min = self.nodes[2 * node].min(self.nodes[2 * node + 1]);
            if self.nodes[node] == min {
                break;
            }
            self.nodes[node] = min;
        }
    }

    /// Sets the time of a rank; [`Tree::rebuild`] has to follow.
    pub fn set_leaf(&mut self, rank: usize, time: u64) {
        self.nodes[self.leaves + rank] = time;
    }

    /// Finds the winners among all times anew: less work than to set most of them one by one.
    pub fn rebuild(&mut self) {
        for node in (1..self.leaves).rev() {
            self.nodes[node] = self.nodes[2 * node].min(self.nodes[2 * node + 1]);
        }
    }

    /// Appends the ranks whose time is `time`, the smallest of all, in order.
    pub fn ranks_at(&self, time: u64, ranks: &mut Vec<u32>) {
        // A parent is the minimum of its children: no leaf has a smaller time, and where a node's is larger, so are those
        // of all leaves below it.
        let mut node = 1;
        if self.nodes[node] != time {
            return;
        }
        loop {
            while node < self.leaves {
                // If it is not the left child's time, it is the right one's.
                node = 2 * node + usize::from(self.nodes[2 * node] != time);
            }
            ranks.push((node - self.leaves) as u32);
            // The next subtree to the right: a brother of this node or of one above.
            loop {
                node >>= node.trailing_ones();
                if node == 0 {
                    return;
                }
                if self.nodes[node + 1] == time {
                    node += 1;
                    break;
                }
                node /= 2;
            }
        }
    }
}
