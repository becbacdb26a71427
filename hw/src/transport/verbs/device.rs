//! An opened RDMA device with one registered segment.

use super::{Library, VerbsConfig};
use crate::probe::rdma::{self, Seat};
use crate::transport::TransportError;
use crate::transport::registration::Nic;
use crate::transport::segment::Segment;
use ibverbs_sys as ffi;
use std::ffi::{CStr, c_int};
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::path::Path;
use std::sync::Arc;

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
    pub(super) region: *mut ffi::ibv_mr,
    /// A 1 for flags that do not travel inline, and its registration.
    pub(super) one: (Box<u32>, *mut ffi::ibv_mr),
    pub(super) segment: Arc<Segment>,
}

// SAFETY: libibverbs' objects may be used from any thread.
unsafe impl Send for Device {}
// SAFETY: as above; the handles are never written after they are made.
unsafe impl Sync for Device {}

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

    /// Opens the NICs of a rank's rails and registers its segment with each: those that the configuration names, or the
    /// nearest to `seat` that `transport` can use.
    ///
    /// # Errors
    /// [`TransportError::Missing`], [`TransportError::Call`].
    pub fn open_all(
        config: &VerbsConfig,
        transport: &str,
        seat: &Seat,
        segment: &Arc<Segment>,
    ) -> Result<Vec<Self>, TransportError> {
        Library::get()?;
        let known = rdma::devices(Path::new(rdma::SYSFS));
        let names = match &config.nics[..] {
            [] => rdma::nearest(&known, transport, seat, usize::from(config.rails.max(1)))
                .map_err(|what| TransportError::Missing { what })?,
            named => named.to_vec(),
        };
        names.iter().map(|name| Self::open(config, name, &known, segment.clone())).collect()
    }

    fn open(
        config: &VerbsConfig,
        name: &str,
        known: &[rdma::RdmaDevice],
        segment: Arc<Segment>,
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
            region: std::ptr::null_mut(),
            one: (Box::new(1), std::ptr::null_mut()),
            segment,
        };
        device.port = device.ask_port(config, known)?;
        // SAFETY: the context is open; the segment and the word live as long as the registrations, see `Drop`.
        unsafe {
            device.domain = some("ibv_alloc_pd", &device.name, (library.ibv_alloc_pd)(device.context))?;
            device.region = device
                .register(device.address(), device.segment.bytes())
                .map_err(|error| failed("ibv_reg_mr", "the segment; is `ulimit -l` large enough?", error))?;
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

    /// Local key of the segment.
    pub(super) fn local_key(&self) -> u32 {
        // SAFETY: registered in `open`.
        unsafe { (*self.region).lkey }
    }

    /// Key by which peers write the segment.
    pub fn remote_key(&self) -> u32 {
        // SAFETY: registered in `open`.
        unsafe { (*self.region).rkey }
    }

    /// Address of the segment as peers name it.
    pub fn address(&self) -> u64 {
        self.segment.address() as u64
    }
}

/// What peers and this rank may do with registered memory; without relaxed ordering, see the module.
fn access() -> c_int {
    (ffi::ibv_access_flags::IBV_ACCESS_LOCAL_WRITE | ffi::ibv_access_flags::IBV_ACCESS_REMOTE_WRITE).0 as c_int
}

/// A region is freed by who asked for it, before the device.
impl Nic for Device {
    type Region = *mut ffi::ibv_mr;

    fn register(&self, address: u64, bytes: u64) -> io::Result<*mut ffi::ibv_mr> {
        // SAFETY: the domain is live; the kernel checks the range, and pins what it accepts.
        let region = unsafe { (self.library.ibv_reg_mr)(self.domain, address as *mut _, bytes as usize, access()) };
        if region.is_null() { Err(io::Error::last_os_error()) } else { Ok(region) }
    }

    fn register_dmabuf(
        &self,
        fd: BorrowedFd<'_>,
        offset: u64,
        bytes: u64,
        address: u64,
    ) -> io::Result<*mut ffi::ibv_mr> {
        let missing = || io::Error::other("this libibverbs has no ibv_reg_dmabuf_mr");
        let register = self.library.reg_dmabuf.ok_or_else(missing)?;
        // SAFETY: the domain is live, the file is open during the call, and the kernel keeps its own reference.
        let region = unsafe { register(self.domain, offset, bytes as usize, address, fd.as_raw_fd(), access()) };
        if region.is_null() { Err(io::Error::last_os_error()) } else { Ok(region) }
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
        // SAFETY: endpoints hold the device in an Arc, so that no queue pair is left; each handle is freed once, and
        // the memory it registers after it.
        unsafe {
            for region in [self.one.1, self.region] {
                if !region.is_null() {
                    (self.library.ibv_dereg_mr)(region);
                }
            }
            if !self.domain.is_null() {
                (self.library.ibv_dealloc_pd)(self.domain);
            }
            (self.library.ibv_close_device)(self.context);
        }
    }
}
