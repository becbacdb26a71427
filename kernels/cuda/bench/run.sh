#!/bin/bash
# run.sh N DIR: takes the readings of run N on the GPU here, into DIR/N. make_csv.py reads DIR.
#
# A reading of the CSV comes from the last run that made it; what a later run made again is not listed in the earlier
# one. Wants nvcc 13.0 (or $NVCC), cuBLAS 13; runs 3 and 5 want a python3 with torch 2.11, run 5 ncu.
set -u
run=$1
here=$(cd "$(dirname "$0")" && pwd)
mkdir -p "$2/$run" && out=$(cd "$2/$run" && pwd) || exit 1
export LAB_RAW=$out/raw$run.csv PYTHONUNBUFFERED=1
nvcc=${NVCC:-nvcc}
flags="-std=c++17 -O3 -gencode=arch=compute_90a,code=sm_90a -I$here/.."
[ -x "$2/lab" ] || $nvcc $flags "$here/lab.cu" -o "$2/lab" -ldl || exit 1
[ -f "$2/attention.cubin" ] || $nvcc $flags -cubin "$here/attention.cu" -o "$2/attention.cubin" || exit 1
lab=$(cd "$2" && pwd)/lab
cubin=$(cd "$2" && pwd)/attention.cubin
cublas=$(find -L /usr/local/cuda* -name libcublas.so.13 2>/dev/null | head -1)
with_cublas=$(dirname "${cublas:-.}"):${LD_LIBRARY_PATH:-}

lab() { step env LD_LIBRARY_PATH="$with_cublas" "$lab" "$@"; }
step() {
  local begin=$(date +%s%N)
  echo "== ${*: -4}"
  timeout 150 "$@" 2>&1
  echo "-- rc $?, $((($(date +%s%N) - begin) / 1000000)) ms"
}
soak() { for v in "$@"; do lab soak "$v" 150 "$RANDOM"; done; }
# Every variant of $1 with every shape of $2, each with the rest of the arguments behind it.
cross() { for v in $1; do for s in $2; do printf '%s ' "$v:$s:$3"; done; done; }

large="8192:8192:8192 8192:512:8192 16384:1024:16384 32768:2048:32768 8192:8192:512 16384:16384:1024"
fused="8192:512:8192:128 16384:1024:16384:128 16384:1024:16384:124 32768:2048:32768:128 32768:2048:32768:124
  8192:8192:512:118 16384:16384:1024:120 32768:32768:2048:120 8192:8192:512:100 16384:16384:1024:100
  32768:32768:2048:100 8192:8192:512:84 16384:16384:1024:84 32768:32768:2048:84"

case $run in
1) # launches and barriers
  lab launch ;;
2) # three stages, the clock over time
  soak gemm_w_o gemm_w_s gemm_w_o3
  lab trace gemm_w_o 132,100,64,8 8192 8
  lab trace gemm_w_s 132 512 64
  lab paired $(cross gemm_w_o3 "$large" 132:16:31) ;;
3) # attention, clocks, clusters
  step python3 "$here/attention.py" "$cubin" 1536,3072,6144,12288,16384 "$out/attention.csv"
  lab clocks gemm_w_d 8,32,64,80,84,92,100,108,112,116,120,124,128,132 8192
  lab clocks gemm_w_o,gemm_w_d,gemm_w_s 84,100,120,132 512,2048
  lab paired $(cross "gemm_p_d gemm_p_d_c2" "$large" 132:16:31) ;;
4) # flags under load, moves, three stages, B stored [N, K]
  soak gemm_p_o gemm_p_o3 gemm_p_o_nk gemm_w_o gemm_w_s
  lab flags gemm_w_d 0,32,64,100,130 8192,512
  lab moves
  lab interference gemm_w_s 100
  lab interference gemm_w_o 100
  lab k gemm_p_o3,gemm_p_o_nk,gemm_p_o 8,132 512,1024,2048,8192
  lab paired $(cross "gemm_p_o gemm_p_o_nk" "$large" 132:16:31) ;;
5) # adding outputs, gaps between launches, device memory traffic, attention by whole waves
  soak gemm_w_d_add gemm_w_s_add
  lab k gemm_w_d,gemm_w_d_add,gemm_w_s,gemm_w_s_add 84,120,132 512,1024,2048
  lab gaps
  lab clocks gemm_w_d,gemm_w_s 84,100,120,132 1024
  step python3 "$here/attention.py" "$cubin" 1536,3072,6144,12288 "$out/attention.csv"
  shapes="$(cross gemm_w_d 8192:8192:8192:132 4) $(cross gemm_w_d 8192:8192:8192:132 8)"
  for s in 8192:8192:8192:132:16 8192:8192:8192:132:32 8192:8192:8192:132:64 16384:1024:16384:132:8 \
    16384:1024:16384:132:16 16384:1024:16384:132:128 32768:2048:32768:128:8 32768:2048:32768:128:16 \
    32768:2048:32768:128:256 8192:512:8192:128:16 8192:8192:512:132:4 8192:8192:512:132:16 8192:8192:512:132:64 \
    16384:16384:1024:132:4 16384:16384:1024:132:16 16384:16384:1024:132:64 32768:32768:2048:120:4 \
    32768:32768:2048:120:16 32768:32768:2048:120:64 32768:32768:2048:120:256; do
    shapes="$shapes gemm_w_d:$s"
  done
  metrics=dram__bytes_read.sum,dram__bytes_write.sum,lts__t_sectors_op_read.sum,lts__t_sectors_op_write.sum
  step ncu --clock-control none --kernel-name regex:gemm_ --metrics "$metrics,gpu__time_duration.sum" --csv \
    --log-file "$out/ncu5.csv" "$lab" one $shapes ;;
6) # fixed costs by loop and drain, clocks
  soak gemm_w_o gemm_p_o gemm_w_s gemm_p_s gemm_w_v gemm_p_v gemm_w_o3 gemm_p_o3
  lab k gemm_w_o,gemm_p_o,gemm_w_o3,gemm_w_s,gemm_p_s,gemm_w_v,gemm_p_v 8,84,120,132 128,256,512,1024,2048,4096,8192,16384
  lab clocks gemm_w_o,gemm_p_o 8,32,64,80,84,100,112,118,120,124,128,132 8192 ;;
7) # the fused kernels' shapes, under load and cold
  lab paired $(cross "gemm_w_o gemm_w_s gemm_w_v" "$fused" 16:21)
  lab cold $(cross "gemm_w_d gemm_w_s" "$fused 8192:8192:8192:132" 16:7)
  lab trace gemm_w_d 132,100 8192 8 ;;
9) # deferred output
  soak gemm_w_d gemm_p_d gemm_w_d_c2 gemm_p_d_c2 gemm_w_d_add
  lab chained gemm_w_d,gemm_p_d,gemm_w_o,gemm_w_s,gemm_w_v 8,84,132 128,512,2048
  lab k gemm_w_d,gemm_p_d,gemm_w_d_add 8,84,120,132 128,256,512,1024,2048,4096,8192,16384
  lab k gemm_w_d_c2,gemm_p_d_c2 8,84,132 128,256,512,1024,2048,8192
  lab paired $(cross "gemm_w_d gemm_w_d_c2" "$large" 132:16:31) $(cross gemm_w_d "$fused" 16:21)
  lab gated gemm_w_d 8,132 512,8192
  lab interference gemm_w_d 100
  lab clocks gemm_w_d 84,120,132 512 ;;
10) # mixes of reads and writes; one product in several tile orders: clocks, device memory traffic
  lab mixes
  orders=""
  for ctas in 120 84; do
    for group in 1 2 4 16 64 256; do orders="$orders 32768:32768:2048:$ctas:$group"; done
    for group in 1 4 16 64; do orders="$orders 16384:16384:1024:$ctas:$group"; done
  done
  variants="gemm_w_s gemm_w_d"
  lab sustained $(for v in $variants; do for s in $orders; do echo "$v:$s"; done; done)
  lab cold $(cross "$variants" "$orders" 7)
  profiled=$(for s in $orders; do echo "gemm_w_s:$s"; done)
  echo $profiled >"$out/profiled.txt"
  step ncu --clock-control none --kernel-name regex:gemm_ --metrics dram__bytes_read.sum,dram__bytes_write.sum --csv \
    --log-file "$out/ncu.csv" "$lab" one $profiled ;;
11) # rows by boxes, alone and beside a product
  lab gathers ;;
12) # commands pushed to the host, alone, beside CTAs that poll it, beside a product
  lab pushes ;;
*)
  echo "run.sh: runs are 1 to 7 and 9 to 12" >&2
  exit 2 ;;
esac 2>&1 | tee "$out/log$run.txt"
