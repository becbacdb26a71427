//! What a program's launches read on the device, as `kernels/cuda/program.cuh` lays it out.

use crate::device::HwError;
use crate::launch::Addresses;
use crate::lower::{DeviceRegion, DeviceRole, DeviceSignal, DeviceTask, DeviceWait, NONE, Program};
use crate::memory::DeviceMemory;

/// Waits and regions of an [`Order`]; those beyond are read where the task says. Source: `program.cuh`.
const ORDER_WAITS: usize = 4;
const ORDER_REGIONS: usize = 6;

/// `Order` of `program.cuh`: a tile with what its loader, consumers and storers need.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Order {
    task: DeviceTask,
    waits: [DeviceWait; ORDER_WAITS],
    regions: [DeviceRegion; ORDER_REGIONS],
}

/// `Start` of `program.cuh`: where a CTA begins, with a copy of what it needs first.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Start {
    of: DeviceRole,
    role: u32,
    cta: u32,
    /// Task of its first tile, if the claim decides it; else [`NONE`].
    index: u32,
    unused: u32,
    first: Order,
}

/// The program's arrays on the device.
pub(crate) struct Arrays {
    pub tasks: DeviceMemory,
    pub waits: DeviceMemory,
    pub signals: DeviceMemory,
    pub regions: DeviceMemory,
    pub roles: DeviceMemory,
    /// By launch.
    pub starts: Vec<DeviceMemory>,
    /// One per tile.
    pub orders: DeviceMemory,
    pub sources: DeviceMemory,
}

impl Arrays {
    /// Writes a program for memory that lies at `addresses`.
    ///
    /// # Errors
    /// [`HwError::Cuda`], for example when the GPU has too little memory.
    pub fn new(program: &Program, addresses: &Addresses) -> Result<Self, HwError> {
        let base = |arena: u32| addresses.arena(arena);
        let signals: Vec<DeviceSignal> = program
            .signals
            .iter()
            .map(|signal| DeviceSignal {
                address: addresses.word(signal.gpu, signal.address as u32),
                gpu: u32::from(signal.gpu != program.gpu),
                ..*signal
            })
            .collect();
        let regions: Vec<DeviceRegion> = program
            .regions
            .iter()
            .map(|&region| DeviceRegion { address: base(region.arena) + region.address, ..region })
            .collect();
        let row = |source: &Option<(u32, u64)>| source.map_or(0, |(arena, offset)| base(arena) + offset);
        let sources: Vec<u64> = program.sources.iter().map(row).collect();
        let (roles, orders) = orders(program, &regions);
        let starts = starts(program, &roles, &orders);
        Ok(Self {
            tasks: DeviceMemory::of::<DeviceTask>(&program.tasks)?,
            waits: DeviceMemory::of::<DeviceWait>(&program.waits)?,
            signals: DeviceMemory::of::<DeviceSignal>(&signals)?,
            regions: DeviceMemory::of::<DeviceRegion>(&regions)?,
            roles: DeviceMemory::of::<DeviceRole>(&roles)?,
            starts: starts.iter().map(|of| DeviceMemory::of::<Start>(of)).collect::<Result<_, _>>()?,
            orders: DeviceMemory::of::<Order>(&orders)?,
            sources: DeviceMemory::of::<u64>(&sources)?,
        })
    }
}

/// The orders of all tiles, and the roles that know where theirs begin. Regions are those with addresses.
fn orders(program: &Program, regions: &[DeviceRegion]) -> (Vec<DeviceRole>, Vec<Order>) {
    let mut orders = Vec::new();
    let mut roles = program.roles.clone();
    for role in roles.iter_mut().filter(|role| role.tiles == 1) {
        role.first_order = orders.len() as u32;
        for task in &program.tasks[role.first_task as usize..][..role.tasks as usize] {
            let mut order = Order { task: *task, ..Order::default() };
            let waits = (task.start_waits + task.step_waits + task.output_waits) as usize;
            let of = (task.inputs + task.outputs) as usize;
            let (waits, of) = (waits.min(ORDER_WAITS), of.min(ORDER_REGIONS));
            order.waits[..waits].copy_from_slice(&program.waits[task.first_wait as usize..][..waits]);
            order.regions[..of].copy_from_slice(&regions[task.first_region as usize..][..of]);
            orders.push(order);
        }
    }
    (roles, orders)
}

/// Where the blocks of each launch begin. A CTA that begins in a role with tiles has its first one decided, by the stride or
/// as its ticket.
fn starts(program: &Program, roles: &[DeviceRole], orders: &[Order]) -> Vec<Vec<Start>> {
    let start = |&crate::lower::DeviceStart { role, cta }: &crate::lower::DeviceStart| {
        let of = roles[role as usize];
        let decided = of.tiles == 1 && cta < of.tasks;
        let first = if decided { orders[(of.first_order + cta) as usize] } else { Order::default() };
        Start { of, role, cta, index: if decided { of.first_task + cta } else { NONE }, unused: 0, first }
    };
    program.launches.iter().map(|launch| launch.starts.iter().map(start).collect()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::lower::{DeviceLaunch, DeviceStart};

    #[test]
    fn sizes_are_those_that_the_device_reads() {
        // 16 bytes are the smallest piece of a bulk copy; `program.cuh` has the same numbers by its structs.
        assert_eq!((size_of::<Order>(), size_of::<DeviceRole>(), size_of::<Start>()), (416, 48, 480));
    }

    #[test]
    fn orders_and_starts_hold_what_their_tasks_name() {
        let wait = |word| DeviceWait { word, count: 1, stride: 1, at_least: 1 };
        let region = |row| DeviceRegion { row, ..DeviceRegion::default() };
        let task = |first_wait, start_waits, first_region| DeviceTask {
            first_wait,
            start_waits,
            first_region,
            inputs: 2,
            outputs: 1,
            ..DeviceTask::default()
        };
        let role =
            |first_task, tasks, claim, tiles| DeviceRole { first_task, tasks, claim, tiles, ..DeviceRole::default() };
        let program = Program {
            roles: vec![role(0, 1, 0, 0), role(1, 2, 0, 1), role(3, 1, 1, 1)],
            tasks: vec![task(0, 0, 0), task(0, 1, 0), task(1, 5, 3), task(6, 0, 6)],
            waits: (0..6).map(wait).collect(),
            launches: vec![DeviceLaunch {
                starts: [(0, 0), (1, 0), (1, 1), (1, 2), (2, 0)].map(|(role, cta)| DeviceStart { role, cta }).into(),
                ..DeviceLaunch::default()
            }],
            ..Program::default()
        };
        let regions: Vec<_> = (0..9).map(region).collect();
        let (roles, orders) = orders(&program, &regions);
        assert_eq!(roles.iter().map(|role| role.first_order).collect::<Vec<_>>(), [0, 0, 2]);
        assert_eq!(orders.len(), 3, "one per tile");
        assert_eq!(orders[1].task, program.tasks[2]);
        assert_eq!(orders[1].waits.map(|wait| wait.word), [1, 2, 3, 4], "the fifth is read where it lies");
        assert_eq!(orders[1].regions.map(|region| region.row), [3, 4, 5, 0, 0, 0]);
        let starts = &starts(&program, &roles, &orders)[0];
        let index = starts.iter().map(|start| start.index).collect::<Vec<_>>();
        assert_eq!(index, [NONE, 1, 2, NONE, 3], "no tile, two by the stride, none left, a ticket");
        assert_eq!((starts[2].first, starts[2].of), (orders[1], roles[1]));
    }
}
