//! What would happen: a discrete-event model that executes a Schedule on a machine.
#![forbid(unsafe_code)]

pub mod machine;
