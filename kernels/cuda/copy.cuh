// Copies by the bulk copy engine through a ring of shared-memory slots. One thread drives a ring.
#pragma once
#include "base.cuh"
#include "flags.cuh"
#include "mbarrier.cuh"
#include "tma.cuh"

// Loads run ahead of stores: of Slots slots, StoresPending may still be read by stores, the rest hold
// loads in flight. `stop` (shared, may be null) ends the copy early, between chunks. Returns bytes stored.
template <u32 Slots, u32 StoresPending>
DEVICE u64 copy_pipelined(u32 smem, u32 bars, u32 chunk, const u8* src, u8* dst, u64 bytes, u64 wrap_bytes,
                          const volatile u32* stop) {
  constexpr u32 kLead = Slots - StoresPending;
  const u64 chunks = bytes / chunk;
  RingPosition load_at, store_at;
  u64 stored = 0;
  u64 load_offset = 0, store_offset = 0;
  for (u64 i = 0; i < chunks + kLead; ++i) {
    if (i < chunks) {
      // the store that used this slot is older than the StoresPending - 1 youngest ones
      if (i >= Slots) store_wait_smem_read<StoresPending - 1>();
      const u32 bar = bars + load_at.slot * 8;
      mbarrier_arrive_expect_bytes(bar, chunk);
      bulk_load(smem + load_at.slot * chunk, src + load_offset, chunk, bar);
      load_offset += chunk;
      if (load_offset == wrap_bytes) load_offset = 0;
      load_at.advance<Slots>();
    }
    if (i >= kLead) {
      mbarrier_wait_bounded(bars + store_at.slot * 8, store_at.parity);
      bulk_store(dst + store_offset, smem + store_at.slot * chunk, chunk);
      store_commit();
      store_offset += chunk;
      if (store_offset == wrap_bytes) store_offset = 0;
      store_at.advance<Slots>();
      ++stored;
      if (stop != nullptr && *stop != 0) {
        // loads still in flight must land before the CTA may end
        const u64 loaded = (i + 1 < chunks ? i + 1 : chunks);
        for (u64 left = loaded - stored; left > 0; --left) {
          mbarrier_wait_bounded(bars + store_at.slot * 8, store_at.parity);
          store_at.advance<Slots>();
        }
        break;
      }
    }
  }
  store_wait_visible<0>();
  return stored * chunk;
}

// One batch of Slots chunks at a time: all loads, then all stores, then (Visible) their full completion or
// only their reads of shared memory. Nothing of the next batch is loaded while this one is stored.
template <u32 Slots, bool Visible>
DEVICE u64 copy_serial(u32 smem, u32 bars, u32 chunk, const u8* src, u8* dst, u64 bytes, u64 wrap_bytes) {
  const u64 batches = bytes / (u64(chunk) * Slots);
  u64 offset = 0;
  for (u64 i = 0; i < batches; ++i) {
    for (u32 s = 0; s < Slots; ++s) {
      mbarrier_arrive_expect_bytes(bars + s * 8, chunk);
      bulk_load(smem + s * chunk, src + offset + u64(s) * chunk, chunk, bars + s * 8);
    }
    for (u32 s = 0; s < Slots; ++s) {
      mbarrier_wait_bounded(bars + s * 8, u32(i & 1));
      bulk_store(dst + offset + u64(s) * chunk, smem + s * chunk, chunk);
      store_commit();
    }
    if (Visible) {
      store_wait_visible<0>();
    } else {
      store_wait_smem_read<0>();
    }
    offset += u64(chunk) * Slots;
    if (offset + u64(chunk) * Slots > wrap_bytes) offset = 0;
  }
  store_wait_visible<0>();
  return batches * Slots * chunk;
}

// The same two, for rows picked by an index list: dst row i = table row rows[i].
template <u32 Slots, u32 StoresPending>
DEVICE void gather_pipelined(u32 smem, u32 bars, u32 row_bytes, const u8* table, const u32* rows, u32 count, u8* dst) {
  constexpr u32 kLead = Slots - StoresPending;
  RingPosition load_at, store_at;
  for (u32 i = 0; i < count + kLead; ++i) {
    if (i < count) {
      const u64 row = rows[i];  // read before the wait: its latency hides behind the store's
      if (i >= Slots) store_wait_smem_read<StoresPending - 1>();
      const u32 bar = bars + load_at.slot * 8;
      mbarrier_arrive_expect_bytes(bar, row_bytes);
      bulk_load(smem + load_at.slot * row_bytes, table + row * row_bytes, row_bytes, bar);
      load_at.advance<Slots>();
    }
    if (i >= kLead) {
      mbarrier_wait_bounded(bars + store_at.slot * 8, store_at.parity);
      bulk_store(dst + u64(i - kLead) * row_bytes, smem + store_at.slot * row_bytes, row_bytes);
      store_commit();
      store_at.advance<Slots>();
    }
  }
  store_wait_visible<0>();
}

template <u32 Slots, bool Visible>
DEVICE void gather_serial(u32 smem, u32 bars, u32 row_bytes, const u8* table, const u32* rows, u32 count, u8* dst) {
  for (u32 i = 0; i + Slots <= count; i += Slots) {
    for (u32 s = 0; s < Slots; ++s) {
      mbarrier_arrive_expect_bytes(bars + s * 8, row_bytes);
      bulk_load(smem + s * row_bytes, table + u64(rows[i + s]) * row_bytes, row_bytes, bars + s * 8);
    }
    for (u32 s = 0; s < Slots; ++s) {
      mbarrier_wait_bounded(bars + s * 8, (i / Slots) & 1);
      bulk_store(dst + u64(i + s) * row_bytes, smem + s * row_bytes, row_bytes);
      store_commit();
    }
    if (Visible) {
      store_wait_visible<0>();
    } else {
      store_wait_smem_read<0>();
    }
  }
  store_wait_visible<0>();
}
