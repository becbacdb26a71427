//! The simulator against closed forms, slow oracles and properties that any model of this kind must have.

mod bounds;
mod cases;
mod closed_forms;
mod completes;
mod conservation;
mod determinism;
mod in_step;
mod isolated;
mod loops;
mod metamorphic;
mod mirror;
mod noise;
mod overlap;
mod sharing_oracle;
mod stuck;
mod sums;
mod support;
mod topology;
mod tuning;
mod waves;
