//! stub
#[allow(dead_code, reason = "the commands that read it land next")]
mod data;

fn main() {}
