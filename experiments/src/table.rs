//! Tables on a terminal: stable widths, units in the headers, numbers to the right.

use std::fmt::Write as _;

/// A table under construction.
#[derive(Clone, Debug, Default)]
pub struct Table {
    headers: Vec<String>,
    rows: Vec<Vec<String>>,
}

impl Table {
    /// A table with these headers.
    pub fn new<'a>(headers: impl IntoIterator<Item = &'a str>) -> Self {
        Self { headers: headers.into_iter().map(str::to_owned).collect(), rows: Vec::new() }
    }

    /// Adds a row; missing cells are empty.
    pub fn row(&mut self, cells: impl IntoIterator<Item = String>) {
        let mut row: Vec<String> = cells.into_iter().collect();
        row.resize(self.headers.len(), String::new());
        self.rows.push(row);
    }

    /// Without the columns that say the same in every row of several, or nothing at all, those of `kept` excepted.
    #[must_use]
    pub fn without_constants(mut self, kept: &[&str]) -> Self {
        for i in (0..self.headers.len()).rev() {
            let constant = self.rows.len() > 1 && self.rows.iter().all(|row| row[i] == self.rows[0][i]);
            let empty = self.rows.iter().all(|row| row[i].is_empty());
            if (constant || empty) && !kept.contains(&self.headers[i].as_str()) {
                self.headers.remove(i);
                self.rows.iter_mut().for_each(|row| drop(row.remove(i)));
            }
        }
        self
    }

    /// The text, a line per row, each after `indent` spaces.
    pub fn render(&self, indent: usize) -> String {
        let column = |i: usize| self.rows.iter().map(move |row| row[i].as_str());
        let length = |text: &str| text.chars().count();
        let widths: Vec<usize> = (0..self.headers.len())
            .map(|i| column(i).map(length).max().unwrap_or(0).max(length(&self.headers[i])))
            .collect();
        let to_the_right: Vec<bool> = (0..self.headers.len())
            .map(|i| {
                column(i).any(is_number) && column(i).all(|cell| is_number(cell) || cell.is_empty() || cell == "-")
            })
            .collect();
        let mut text = String::new();
        let mut line = |cells: &[String]| {
            let mut row = " ".repeat(indent);
            for (i, cell) in cells.iter().enumerate() {
                let gap = if i == 0 { "" } else { "  " };
                let width = widths[i];
                let _ = if to_the_right[i] {
                    write!(row, "{gap}{cell:>width$}")
                } else {
                    write!(row, "{gap}{cell:width$}")
                };
            }
            let _ = writeln!(text, "{}", row.trim_end());
        };
        line(&self.headers);
        line(&widths.iter().map(|&width| "-".repeat(width)).collect::<Vec<_>>());
        self.rows.iter().for_each(|row| line(row));
        text
    }
}

fn is_number(cell: &str) -> bool {
    let digits = cell.trim_end_matches(['%', ' ']);
    digits.parse::<f64>().is_ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_that_say_nothing_are_left_out() {
        let table = |rows: &[[&str; 3]]| {
            let mut table = Table::new(["a", "b", "c"]);
            for row in rows {
                table.row(row.map(str::to_owned));
            }
            table.without_constants(&["c"]).headers
        };
        assert_eq!(table(&[["1", "", "3"]]), ["a", "c"]);
        assert_eq!(table(&[["1", "2", "3"], ["1", "4", "3"]]), ["b", "c"]);
    }

    #[test]
    fn numbers_stand_to_the_right() {
        let mut table = Table::new(["role", "time_us", "note"]);
        table.row(["compute", "1.25", "a"].map(str::to_owned));
        table.row(["send", "117.00"].map(str::to_owned));
        assert_eq!(
            table.render(2),
            "  role     time_us  note\n  -------  -------  ----\n  compute     1.25  a\n  send      117.00\n"
        );
    }
}
