//! Reference results in f64.

use crate::kernel::Element;

/// Rows `row0..row0 + rows` and columns `col0..col0 + cols` of `a x b`, with the sums of absolute terms.
pub(crate) fn matmul(
    row0: u64,
    rows: u64,
    col0: u64,
    cols: u64,
    depth: u64,
    element: &Element<'_>,
) -> (Vec<f64>, Vec<f64>) {
    let b: Vec<f64> = (0..depth).flat_map(|k| (col0..col0 + cols).map(move |c| element("b", k, c))).collect();
    let mut values = Vec::with_capacity((rows * cols) as usize);
    let mut magnitudes = Vec::with_capacity((rows * cols) as usize);
    for row in row0..row0 + rows {
        let mut sum = vec![0.0; cols as usize];
        let mut magnitude = vec![0.0; cols as usize];
        for (k, b_row) in b.chunks_exact(cols as usize).enumerate() {
            let a = element("a", row, k as u64);
            for (c, &b) in b_row.iter().enumerate() {
                sum[c] += a * b;
                magnitude[c] += (a * b).abs();
            }
        }
        values.extend(sum);
        magnitudes.extend(magnitude);
    }
    (values, magnitudes)
}
