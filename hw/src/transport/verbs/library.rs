//! libibverbs, found at run time.

use crate::transport::TransportError;
use ibverbs_sys as ffi;
use std::ffi::{CStr, c_char, c_int, c_void};
use std::sync::OnceLock;

/// `ibv_reg_dmabuf_mr`: domain, offset, length, address for peers, file, access.
pub(super) type RegDmaBuf = unsafe extern "C" fn(*mut ffi::ibv_pd, u64, usize, u64, c_int, c_int) -> *mut ffi::ibv_mr;

/// Declares the functions that are taken from the library.
macro_rules! functions {
    ($($name:ident($($argument:ty),*) -> $result:ty;)*) => {
        /// The functions of libibverbs that this crate calls.
        ///
        /// Safety contract of each: that of its manual page. Pointers must be to live objects of the same context.
        #[derive(Debug)]
        #[allow(missing_docs, reason = "their manual pages say what they do")]
        pub struct Library {
            $(pub(super) $name: unsafe extern "C" fn($($argument),*) -> $result,)*
            /// Not in libraries before rdma-core 34.
            pub(super) reg_dmabuf: Option<RegDmaBuf>,
        }

        impl Library {
            fn open() -> Result<Self, String> {
                // SAFETY: the library's initialisers are rdma-core's own. It is never unloaded.
                let library = unsafe { libloading::Library::new("libibverbs.so.1") }.map_err(|error| error.to_string())?;
                let library = Box::leak(Box::new(library));
                // SAFETY: as below.
                let reg_dmabuf = unsafe { library.get::<RegDmaBuf>(b"ibv_reg_dmabuf_mr\0") }.ok().map(|found| *found);
                Ok(Self {
                    reg_dmabuf,
                    $($name: {
                        // SAFETY: the type is that of the function in rdma-core's headers.
                        *unsafe { library.get(concat!(stringify!($name), "\0").as_bytes()) }
                            .map_err(|error| error.to_string())?
                    },)*
                })
            }
        }
    };
}

functions! {
    ibv_get_device_list(*mut c_int) -> *mut *mut ffi::ibv_device;
    ibv_free_device_list(*mut *mut ffi::ibv_device) -> ();
    ibv_get_device_name(*mut ffi::ibv_device) -> *const c_char;
    ibv_open_device(*mut ffi::ibv_device) -> *mut ffi::ibv_context;
    ibv_close_device(*mut ffi::ibv_context) -> c_int;
    ibv_get_async_event(*mut ffi::ibv_context, *mut ffi::ibv_async_event) -> c_int;
    ibv_ack_async_event(*mut ffi::ibv_async_event) -> ();
    ibv_query_port(*mut ffi::ibv_context, u8, *mut ffi::ibv_port_attr) -> c_int;
    ibv_query_gid(*mut ffi::ibv_context, u8, c_int, *mut ffi::ibv_gid) -> c_int;
    ibv_alloc_pd(*mut ffi::ibv_context) -> *mut ffi::ibv_pd;
    ibv_dealloc_pd(*mut ffi::ibv_pd) -> c_int;
    ibv_reg_mr(*mut ffi::ibv_pd, *mut c_void, usize, c_int) -> *mut ffi::ibv_mr;
    ibv_dereg_mr(*mut ffi::ibv_mr) -> c_int;
    ibv_create_cq(*mut ffi::ibv_context, c_int, *mut c_void, *mut ffi::ibv_comp_channel, c_int) -> *mut ffi::ibv_cq;
    ibv_destroy_cq(*mut ffi::ibv_cq) -> c_int;
    ibv_create_qp(*mut ffi::ibv_pd, *mut ffi::ibv_qp_init_attr) -> *mut ffi::ibv_qp;
    ibv_modify_qp(*mut ffi::ibv_qp, *mut ffi::ibv_qp_attr, c_int) -> c_int;
    ibv_destroy_qp(*mut ffi::ibv_qp) -> c_int;
    ibv_create_ah(*mut ffi::ibv_pd, *mut ffi::ibv_ah_attr) -> *mut ffi::ibv_ah;
    ibv_destroy_ah(*mut ffi::ibv_ah) -> c_int;
    ibv_qp_to_qp_ex(*mut ffi::ibv_qp) -> *mut ffi::ibv_qp_ex;
    ibv_wc_status_str(c_int) -> *const c_char;
}

impl Library {
    /// The library, or why it is not here.
    ///
    /// # Errors
    /// [`TransportError::Missing`].
    pub fn get() -> Result<&'static Self, TransportError> {
        static LIBRARY: OnceLock<Result<Library, String>> = OnceLock::new();
        LIBRARY.get_or_init(Self::open).as_ref().map_err(|error| TransportError::Missing {
            what: format!("no RDMA library ({error}); install libibverbs1 and ibverbs-providers"),
        })
    }

    /// The library's word for a completion status.
    pub(super) fn status(&self, status: u32) -> &'static str {
        // SAFETY: returns a constant string for every number.
        let text = unsafe { CStr::from_ptr((self.ibv_wc_status_str)(status as c_int)) };
        text.to_str().unwrap_or("unknown status")
    }
}
