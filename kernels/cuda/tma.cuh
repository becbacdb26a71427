// The bulk copy engine: tensor-map copies, plain bulk copies, and their completion.
#pragma once
#include "base.cuh"

DEVICE void tma_prefetch_map(const TensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

// All matrices are described as (64 columns, rows, column blocks of 64): a box's inner row is 128 bytes,
// the widest that the 128-byte swizzle takes, and one instruction still fetches several column blocks.
DEVICE void tma_load(u32 dst, const TensorMap* map, u32 bar, u32 row, u32 column_block) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5}], [%2];" ::"r"(dst),
      "l"(map), "r"(bar), "r"(0), "r"(row), "r"(column_block)
      : "memory");
}

// The same bytes land at the same shared offset of every CTA in `cta_mask`, and complete on the barrier
// at the same offset there.
DEVICE void tma_load_multicast(u32 dst, const TensorMap* map, u32 bar, u32 row, u32 column_block, u16 cta_mask) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1, {%3, %4, %5}], [%2], %6;" ::"r"(
          dst),
      "l"(map), "r"(bar), "r"(0), "r"(row), "r"(column_block), "h"(cta_mask)
      : "memory");
}

DEVICE void tma_store(const TensorMap* map, u32 src, u32 row, u32 column_block) {
  asm volatile("cp.async.bulk.tensor.3d.global.shared::cta.bulk_group [%0, {%2, %3, %4}], [%1];" ::"l"(map), "r"(src),
               "r"(0), "r"(row), "r"(column_block)
               : "memory");
}

// Adds bf16 values to those in global memory; the addition is done by the memory side.
DEVICE void tma_store_add(const TensorMap* map, u32 src, u32 row, u32 column_block) {
  asm volatile("cp.reduce.async.bulk.tensor.3d.global.shared::cta.add.bulk_group [%0, {%2, %3, %4}], [%1];" ::"l"(map),
               "r"(src), "r"(0), "r"(row), "r"(column_block)
               : "memory");
}

DEVICE void bulk_load(u32 dst, const void* src, u32 bytes, u32 bar) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(dst),
               "l"(src), "r"(bytes), "r"(bar)
               : "memory");
}

DEVICE void bulk_store(void* dst, u32 src, u32 bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(dst), "r"(src), "r"(bytes) : "memory");
}

DEVICE void store_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }

// At most Pending of this thread's store groups still read shared memory.
template <u32 Pending>
DEVICE void store_wait_smem_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(Pending) : "memory");
}

// At most Pending of this thread's store groups are not yet visible in global memory.
template <u32 Pending>
DEVICE void store_wait_visible() {
  asm volatile("cp.async.bulk.wait_group %0;" ::"n"(Pending) : "memory");
}

// Orders this thread's ordinary shared-memory stores before later reads by the copy engine or wgmma.
DEVICE void fence_smem_to_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// Orders what this thread has seen of others' ordinary global stores (through a flag) before its later bulk copies.
DEVICE void fence_global_to_async() { asm volatile("fence.proxy.async.global;" ::: "memory"); }
