// A schedule lowered for one launch: what the host writes and the interpreter reads.
//
// hw/src/lower.rs writes the same structs; a field is added in both places.
#pragma once
#include "base.cuh"

constexpr u32 kNone = ~0u;

// The host writes them before a launch. Not parameters: a launch takes some 0.08 us longer for each KB of those. Not device
// memory: there each CTA would have to fence before it uses one, which takes it a microsecond.
constexpr u32 kMaxMaps = 64;
__constant__ TensorMap tensor_maps[kMaxMaps];

enum Op : u32 { kGemm, kCopy, kReduce, kFill, kPut, kSync, kGather, kAttention, kMerge };
enum Claim : u32 { kStrided, kTicket, kReady };

// Waits of a task lie behind each other: those of the start, of k steps, of the output.
struct Wait {
  u32 word;  // first flag of the run
  u32 count;
  u32 stride;
  u32 at_least;
};

struct Signal {
  u64 address;
  u32 add;
  u32 remote;  // the flag lies on another GPU
};

// `blocks` x `rows` x `row_bytes` of its task. A tensor map sees the buffer as rows of `row_pitch` bytes.
struct Region {
  u64 address;
  u64 block_pitch;
  u32 row_pitch;
  u32 map;            // index of a map whose box is 128 rows, for copies and operand A; B and outputs have their own
  u32 row;            // of block 0 in the map
  u32 column_block;   // of block 0, in units of 64 elements
  u32 block_rows;     // from a block to the next in the map
  u32 block_columns;  // likewise, in units of 64 elements
  u32 add;            // outputs of a GEMM: added
  u32 unused;
};

// Bits of a task's flags.
constexpr u32 kFirst = 1;    // attention: starts from an empty state
constexpr u32 kLast = 2;     // attention: writes the finished block
constexpr u32 kOverlap = 4;  // gather: loads run ahead of stores

// Regions: a GEMM's a, b, outputs; an attention tile's q, k, v, then state unless it is first and last (four inputs),
// then o and l if it is last (two outputs); a merge's o and l of each part, then of the result; else inputs, then outputs.
struct Task {
  u32 op;
  u32 first_wait;
  u32 start_waits;
  u32 step_waits;
  u32 output_waits;
  u32 first_signal;
  u32 signals;
  u32 first_region;
  u32 inputs;
  u32 outputs;
  u32 blocks;
  u32 rows;
  u32 row_bytes;
  u32 steps;  // of a tile; a gather's first entry among the sources, its rows in flight being `blocks`
  u32 number;  // in the role's list
  u32 flags;
};

// What a tile's loader, consumers and storers need to know, in one piece that one bulk copy fetches. Waits (start first) and
// regions beyond those that fit are read where the task says.
constexpr u32 kOrderWaits = 4;
constexpr u32 kOrderRegions = 6;
struct Order {
  Task task;
  Wait waits[kOrderWaits];
  Region regions[kOrderRegions];
};

struct Role {
  u32 first_task;
  u32 tasks;
  u32 claim;
  u32 window;
  u32 lanes;
  u32 recycle;   // role, or kNone
  u32 tiles;     // its tasks are GEMM or attention tiles
  u32 ctas;
  u32 cursor;    // word: next ticket, or the first task of the window
  u32 claimed;   // first word, one per task (Ready)
  u32 first_order;  // of its tasks, if they are tiles
  u32 unused;
};

// Where a CTA begins, with a copy of what it needs first: one trip to memory tells all.
struct Start {
  Role of;
  u32 role;
  u32 cta;
  u32 index;  // of the task that is its first tile, if the claim decides it; else kNone
  u32 unused;
  Order first;
};

// A wait that lasts long, in host memory: what the watchdog's trap leaves behind.
struct Blocked {
  u32 task;  // index + 1, 0: none
  u32 word;
  u32 have;
  u32 need;
};
constexpr u32 kBlockedPerCta = 4;  // loader, two storers, movers

// The clock of an SM, and where it stood at two moments of the global timer: what places its cycles in time.
struct CtaTimes {
  u64 begin_ns, end_ns, begin_cycles, end_cycles;
};

// When a task went on, in cycles of its SM.
struct Stamps {
  u64 taken;  // claimed
  u64 start;  // the waits of its start were met
  u64 free;   // its CTA went on to the next one
  u64 end;    // its writes were visible
  u32 block;
  u32 lane;
  u32 waited_for;  // word of its start that was waited for last, or kNone
  u32 unused;
};

struct Program {
  const Task* tasks;
  const Wait* waits;
  const Signal* signals;
  const Region* regions;
  const Role* roles;
  const Start* starts;
  const Order* orders;
  const u64* sources;  // rows that gathers fetch: address, 0 for a row of zeros
  u32* words;       // flags, then tickets and claims; zero at the launch
  u64* fifo;        // host memory: (run << 32) + task + 1
  Blocked* blocked;  // host memory
  CtaTimes* times;
  Stamps* stamps;   // one per task, or null
  u32 fifo_head;    // word
  u32 run;
  u32 peers;        // other GPUs raise flags here
  u32 maps;         // how many there are
  // log2(e) / sqrt(head dimension). A parameter, not a constant of the code: with an immediate operand in its FFMAs
  // attention of 128 rows took 1 % longer than with a uniform register.
  float scale_log2;
  u32 unused;
};
