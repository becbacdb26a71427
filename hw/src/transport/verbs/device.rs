//! An opened RDMA device with the memory of a rank registered.

use super::{Library, VerbsConfig};
use crate::probe::rdma::{self, Seat};
use crate::transport::TransportError;
use crate::transport::Words;
use crate::transport::registration::{Nic, Path as Way, reasons, register};
use crate::transport::segment::{Layout, Segment};
use ibverbs_sys as ffi;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use std::ffi::{CStr, c_int};
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// A port and the address that peers reach it by.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Port {
    /// Number, from 1.
    pub number: u8,
    /// Index of the GID.
    pub gid_index: u8,
    /// GID.
    pub gid: [u8; 16],
    /// Local identifier, on InfiniBand.
    pub lid: u16,
    /// Active MTU, as the verbs count it.
    pub mtu: u32,
    /// Whether frames are Ethernet's, which need the GID.
    pub ethernet: bool,
}

/// A device, a protection domain, and a segment that peers may write.
#[derive(Debug)]
pub struct Device {
    pub(super) library: &'static Library,
    /// Name.
    pub name: String,
    /// Whether it is a program of the kernel, not hardware.
    pub software: bool,
    /// Port in use.
    pub port: Port,
    pub(super) context: *mut ffi::ibv_context,
    pub(super) domain: *mut ffi::ibv_pd,
    region: Option<Region>,
    /// How the memory was registered.
    pub(super) way: Way,
    /// A 1 for flags that do not travel inline, and its registration.
    pub(super) one: (Box<u32>, *mut ffi::ibv_mr),
    exposed: Exposed,
    /// Since when the port is down.
    down: Mutex<Option<Instant>>,
}

/// Memory of a rank that peers write.
#[derive(Clone, Debug)]
pub struct Exposed {
    address: u64,
    bytes: u64,
    words: Words,
    owner: Owner,
}

/// Whose memory it is.
#[derive(Clone, Debug)]
enum Owner {
    /// The host's; kept as long as it is registered.
    Host(#[expect(dead_code, reason = "it is held, not read")] Arc<Segment>),
    /// A GPU's, to which these ways may be tried. Whoever frees it first takes the registration's pages away, which a
    /// NIC then refuses to touch.
    Gpu(crate::device::Device, Vec<Way>),
}

impl Exposed {
    /// A segment of the host.
    pub fn host(segment: &Arc<Segment>) -> Self {
        let (address, bytes) = (segment.address() as u64, segment.bytes());
        Self { address, bytes, words: segment.words(), owner: Owner::Host(segment.clone()) }
    }

    /// Memory of a GPU that begins at an address and is laid out like this; the ways to it in the order of trying.
    pub fn gpu(device: crate::device::Device, address: u64, layout: &Layout, ways: &[Way]) -> Self {
        let (bytes, words) = (layout.bytes, layout.words());
        Self { address, bytes, words, owner: Owner::Gpu(device, ways.to_vec()) }
    }
}

/// A registration; it ends when it is dropped, before that of its domain.
#[derive(Debug)]
pub struct Region {
    library: &'static Library,
    handle: *mut ffi::ibv_mr,
}

impl Drop for Region {
    fn drop(&mut self) {
        // SAFETY: registered once, and its domain is live: see `Device::drop`.
        unsafe { (self.library.ibv_dereg_mr)(self.handle) };
    }
}

/// A port may be down for so long: the NIC's retries bridge it.
const LINK_GRACE: Duration = Duration::from_secs(2);

// SAFETY: libibverbs' objects may be used from any thread.
unsafe impl Send for Device {}
// SAFETY: as above; the handles are never written after they are made.
unsafe impl Sync for Device {}

/// An event of a device, as far as it matters here.
enum Happened {
    Down,
    Up,
    Fatal,
    Other,
}

/// What a context without a post function would return: ENOSYS.
pub(super) const NOT_THERE: c_int = 38;

pub(super) fn failed(call: &'static str, what: impl Into<String>, error: io::Error) -> TransportError {
    TransportError::Call { call, what: what.into(), error }
}

/// Checks a call that returns an error number.
pub(super) fn zero(call: &'static str, what: impl Into<String>, result: c_int) -> Result<(), TransportError> {
    if result == 0 { Ok(()) } else { Err(failed(call, what, io::Error::from_raw_os_error(result))) }
}

/// Checks a call that returns a pointer and sets errno.
fn some<T>(call: &'static str, what: &str, pointer: *mut T) -> Result<*mut T, TransportError> {
    if pointer.is_null() { Err(failed(call, what, io::Error::last_os_error())) } else { Ok(pointer) }
}

impl Device {
    /// A completion queue with room for `depth` entries; who asked for it destroys it before the device.
    ///
    /// # Errors
    /// [`TransportError::Call`].
    pub fn completion_queue(&self, depth: u32) -> Result<*mut ffi::ibv_cq, TransportError> {
        let none = std::ptr::null_mut();
        // SAFETY: the context is open as long as the device lives.
        some("ibv_create_cq", &format!("{depth} entries"), unsafe {
            (self.library.ibv_create_cq)(self.context, depth as c_int, none, std::ptr::null_mut(), 0)
        })
    }

    /// Opens the NICs of a rank's rails and registers its memory with each: those that the configuration names, or the
    /// nearest to `seat` that `transport` can use.
    ///
    /// # Errors
    /// [`TransportError::Missing`], [`TransportError::Call`].
    pub fn open_all(
        config: &VerbsConfig,
        transport: &str,
        seat: &Seat,
        exposed: &Exposed,
    ) -> Result<Vec<Self>, TransportError> {
        Library::get()?;
        let known = rdma::devices(Path::new(rdma::SYSFS));
        let names = match &config.nics[..] {
            [] => rdma::nearest(&known, transport, seat, usize::from(config.rails.max(1)))
                .map_err(|what| TransportError::Missing { what })?,
            named => named.to_vec(),
        };
        let open = |name: &String| Self::open(config, name, &known, exposed.clone());
        let mut devices = names.iter().map(open).collect::<Result<Vec<_>, _>>()?;
        let (regions, way) = match &exposed.owner {
            Owner::Host(_) => {
                let one = |device: &Self| device.register(exposed.address, exposed.bytes);
                let regions = devices.iter().map(one).collect::<Result<Vec<_>, _>>();
                let what = "the segment; is `ulimit -l` large enough?";
                (regions.map_err(|error| failed("ibv_reg_mr", what, error))?, Way::Host)
            }
            Owner::Gpu(gpu, ways) => register(&devices, gpu, (exposed.address, exposed.bytes), ways)
                .map_err(|refused| TransportError::NoWay { why: reasons(&refused) })?,
        };
        for (device, region) in devices.iter_mut().zip(regions) {
            (device.region, device.way) = (Some(region), way);
        }
        Ok(devices)
    }

    /// How the rank's memory was registered.
    pub const fn way(&self) -> Way {
        self.way
    }

    fn open(
        config: &VerbsConfig,
        name: &str,
        known: &[rdma::RdmaDevice],
        exposed: Exposed,
    ) -> Result<Self, TransportError> {
        let library = Library::get()?;
        let context = open(library, name)?;
        let mut device = Self {
            library,
            name: name.to_owned(),
            software: known.iter().any(|device| device.name == name && device.software),
            port: Port { number: config.port, gid_index: 0, gid: [0; 16], lid: 0, mtu: 1, ethernet: false },
            context,
            domain: std::ptr::null_mut(),
            region: None,
            way: Way::Host,
            one: (Box::new(1), std::ptr::null_mut()),
            exposed,
            down: Mutex::new(None),
        };
        device.port = device.ask_port(config, known)?;
        // SAFETY: the context is open; the word lives as long as its registration, see `Drop`.
        unsafe {
            device.domain = some("ibv_alloc_pd", &device.name, (library.ibv_alloc_pd)(device.context))?;
            let one: *mut u32 = &raw mut *device.one.0;
            let region = (library.ibv_reg_mr)(device.domain, one.cast(), 4, 0);
            device.one.1 = some("ibv_reg_mr", "a word", region)?;
        }
        Ok(device)
    }

    fn ask_port(&self, config: &VerbsConfig, known: &[rdma::RdmaDevice]) -> Result<Port, TransportError> {
        // SAFETY: all-zero is a value of these plain structures, and both outlive the calls.
        let (mut port, mut gid): (ffi::ibv_port_attr, ffi::ibv_gid) = unsafe { std::mem::zeroed() };
        let what = format!("{} port {}", self.name, config.port);
        // SAFETY: the context is open.
        zero("ibv_query_port", &what, unsafe {
            (self.library.ibv_query_port)(self.context, config.port, &raw mut port)
        })?;
        if port.state != ffi::ibv_port_state::IBV_PORT_ACTIVE {
            return Err(TransportError::Missing { what: format!("{what} is not active; is its link up?") });
        }
        let ethernet = u32::from(port.link_layer) == u32::from(ffi::IBV_LINK_LAYER_ETHERNET as u8);
        let gid_index = match config.gid_index {
            Some(index) => index,
            None => known
                .iter()
                .filter(|device| device.name == self.name)
                .flat_map(|device| &device.ports)
                .find(|port| port.number == config.port)
                .map_or(0, |port| port.gid_index),
        };
        // SAFETY: the context is open.
        zero("ibv_query_gid", format!("{what}, index {gid_index}"), unsafe {
            (self.library.ibv_query_gid)(self.context, config.port, c_int::from(gid_index), &raw mut gid)
        })?;
        // SAFETY: both views of the union are plain bytes.
        let gid = unsafe { gid.raw };
        Ok(Port { number: config.port, gid_index, gid, lid: port.lid, mtu: port.active_mtu, ethernet })
    }

    /// Whether the port is up, or was a moment ago, by the events that the kernel has sent since the last call.
    ///
    /// # Errors
    /// [`TransportError::PortDown`], [`TransportError::Fatal`].
    pub fn is_well(&self) -> Result<(), TransportError> {
        let mut down = self.down.lock().unwrap_or_else(PoisonError::into_inner);
        while let Some(event) = self.event() {
            match event {
                Happened::Down => _ = down.get_or_insert_with(Instant::now),
                Happened::Up => *down = None,
                Happened::Fatal => return Err(TransportError::Fatal { device: self.name.clone() }),
                Happened::Other => {}
            }
        }
        match down.map(|since| since.elapsed()) {
            Some(down) if down > LINK_GRACE => Err(TransportError::PortDown {
                device: self.name.clone(),
                port: self.port.number,
                down_s: down.as_secs(),
            }),
            _ => Ok(()),
        }
    }

    /// The next event that waits.
    fn event(&self) -> Option<Happened> {
        // SAFETY: the context is open, and its file as long as it is.
        let file = unsafe { BorrowedFd::borrow_raw((*self.context).async_fd) };
        let now = Timespec { tv_sec: 0, tv_nsec: 0 };
        if !poll(&mut [PollFd::new(&file, PollFlags::IN)], Some(&now)).is_ok_and(|ready| ready > 0) {
            return None;
        }
        // SAFETY: an event waits, so that the call does not block; it is acknowledged before anything is destroyed,
        // which would otherwise wait for that. A port event's element is a number.
        unsafe {
            let mut event: ffi::ibv_async_event = std::mem::zeroed();
            if (self.library.ibv_get_async_event)(self.context, &raw mut event) != 0 {
                return None;
            }
            (self.library.ibv_ack_async_event)(&raw mut event);
            let is_mine = || event.element.port_num == c_int::from(self.port.number);
            Some(match event.event_type {
                ffi::IBV_EVENT_PORT_ERR if is_mine() => Happened::Down,
                ffi::IBV_EVENT_PORT_ACTIVE if is_mine() => Happened::Up,
                ffi::IBV_EVENT_DEVICE_FATAL => Happened::Fatal,
                _ => Happened::Other,
            })
        }
    }

    fn keys(&self) -> (u32, u32) {
        let region = self.region.as_ref().expect("`open_all` registers before it gives a device away");
        // SAFETY: the registration is live.
        unsafe { ((*region.handle).lkey, (*region.handle).rkey) }
    }

    /// Local key of the memory.
    pub(super) fn local_key(&self) -> u32 {
        self.keys().0
    }

    /// Key by which peers write the memory.
    pub fn remote_key(&self) -> u32 {
        self.keys().1
    }

    /// Address of the memory as peers name it.
    pub const fn address(&self) -> u64 {
        self.exposed.address
    }

    /// Size of the memory.
    pub(super) const fn bytes(&self) -> u64 {
        self.exposed.bytes
    }

    /// Where the flag words lie in it.
    pub(super) const fn words(&self) -> Words {
        self.exposed.words
    }
}

/// What peers and this rank may do with registered memory; without relaxed ordering, see the module.
fn access() -> c_int {
    (ffi::ibv_access_flags::IBV_ACCESS_LOCAL_WRITE | ffi::ibv_access_flags::IBV_ACCESS_REMOTE_WRITE).0 as c_int
}

impl Nic for Device {
    type Region = Region;

    fn register(&self, address: u64, bytes: u64) -> io::Result<Region> {
        // SAFETY: the domain is live; the kernel checks the range, and pins what it accepts.
        let handle = unsafe { (self.library.ibv_reg_mr)(self.domain, address as *mut _, bytes as usize, access()) };
        if handle.is_null() { Err(io::Error::last_os_error()) } else { Ok(Region { library: self.library, handle }) }
    }

    fn register_dmabuf(&self, fd: BorrowedFd<'_>, offset: u64, bytes: u64, address: u64) -> io::Result<Region> {
        let missing = || io::Error::other("this libibverbs has no ibv_reg_dmabuf_mr");
        let register = self.library.reg_dmabuf.ok_or_else(missing)?;
        // SAFETY: the domain is live, the file is open during the call, and the kernel keeps its own reference.
        let handle = unsafe { register(self.domain, offset, bytes as usize, address, fd.as_raw_fd(), access()) };
        if handle.is_null() { Err(io::Error::last_os_error()) } else { Ok(Region { library: self.library, handle }) }
    }
}

fn open(library: &Library, wanted: &str) -> Result<*mut ffi::ibv_context, TransportError> {
    let mut count = 0;
    // SAFETY: `count` outlives the call; names and devices are used before the list is freed.
    unsafe {
        let list = (library.ibv_get_device_list)(&raw mut count);
        // A kernel without the modules says ENOSYS: no device, either way.
        let devices = if list.is_null() { &[][..] } else { std::slice::from_raw_parts(list, count as usize) };
        let name = |&device: &*mut ffi::ibv_device| {
            CStr::from_ptr((library.ibv_get_device_name)(device)).to_string_lossy().into_owned()
        };
        let found = devices.iter().find(|device| name(device) == wanted);
        let context = found.map(|&device| (library.ibv_open_device)(device));
        let error = io::Error::last_os_error();
        let names: Vec<String> = devices.iter().map(name).collect();
        if !list.is_null() {
            (library.ibv_free_device_list)(list);
        }
        match context {
            Some(context) if !context.is_null() => Ok(context),
            Some(_) => Err(failed("ibv_open_device", wanted, error)),
            None => Err(TransportError::Missing { what: rdma::no_such(wanted, &names) }),
        }
    }
}

impl Drop for Device {
    fn drop(&mut self) {
        self.region = None;
        // SAFETY: endpoints hold the device in an Arc, so that no queue pair is left; each handle is freed once, and
        // the memory it registers after it.
        unsafe {
            if !self.one.1.is_null() {
                (self.library.ibv_dereg_mr)(self.one.1);
            }
            if !self.domain.is_null() {
                (self.library.ibv_dealloc_pd)(self.domain);
            }
            (self.library.ibv_close_device)(self.context);
        }
    }
}
