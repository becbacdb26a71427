//! Structure of the GEMM-family schedules: task counts, bytes, symmetry, bounds, and errors of bad shapes.

mod ag_gemm;
mod case;
mod gemm_ar;
mod gemm_rs;
mod tally;
