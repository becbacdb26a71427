//! The static checker.

mod shape;

pub use shape::{MAX_READY_FLAGS, MAX_READY_WAITS, MAX_WINDOW, PIECE_BYTES, ShapeError, Target, check_task};
