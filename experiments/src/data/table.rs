//! CSVs, those with provenance among them, and fields that know where they stand.

use super::{DataError, read_bytes};
use serde::Deserialize;
use std::collections::BTreeMap;
use std::path::Path;
use std::str::FromStr;
use tilewire_sim::machine::Kind;

/// Where a CSV comes from: the TOML file beside it.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Provenance {
    /// How the values came to be known.
    pub kind: Kind,
    /// Machine, repository or page.
    #[serde(rename = "where")]
    pub place: String,
    /// Versions that matter.
    #[serde(default)]
    pub software: BTreeMap<String, String>,
    /// How the values were read.
    pub protocol: String,
    /// When.
    pub date: toml::value::Datetime,
    /// Hash of the CSV, see the module's text.
    pub blake3: String,
    /// Meaning and unit of every column.
    pub columns: BTreeMap<String, String>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct ProvenanceFile {
    source: Provenance,
}

/// A CSV whose rows all have the header's columns. Lines that begin with `#` are comments.
#[derive(Clone, Debug)]
pub struct Sheet {
    /// Path, as errors name it.
    pub file: String,
    /// Column names.
    pub columns: Vec<String>,
    /// Rows in the file's order.
    pub rows: Vec<Row>,
    header_line: u64,
}

/// A CSV and its provenance.
#[derive(Clone, Debug)]
pub struct Table {
    /// The CSV.
    pub sheet: Sheet,
    /// Provenance.
    pub provenance: Provenance,
}

/// A row of a [`Sheet`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Row {
    /// Line of the file, from 1.
    pub line: u64,
    /// One field per column.
    pub fields: Vec<String>,
}

/// A field with its place, to be parsed.
#[derive(Clone, Copy, Debug)]
pub struct Cell<'a> {
    sheet: &'a Sheet,
    line: u64,
    column: usize,
    /// The field's text.
    pub text: &'a str,
}

impl Sheet {
    /// Reads a file.
    ///
    /// # Errors
    /// [`DataError`] for what is no rectangular CSV.
    pub fn read(file: &Path) -> Result<Self, DataError> {
        let name = file.display().to_string();
        let bytes = read_bytes(file).map_err(|message| DataError::Read { file: name.clone(), message })?;
        match std::str::from_utf8(&bytes) {
            Ok(text) => Self::parse(&name, &plain(text)),
            Err(error) => Err(not_text(&name, &bytes, error.valid_up_to())),
        }
    }

    /// Reads text with LF line ends.
    ///
    /// # Errors
    /// As [`Sheet::read`].
    pub fn parse(file: &str, text: &str) -> Result<Self, DataError> {
        // With a final line end, the line after a record is always the reader's, comments and quoted line ends included. One
        // more stays unread, unless a quote is open.
        let text = if text.ends_with('\n') { format!("{text}\n") } else { format!("{text}\n\n") };
        let mut reader = csv::ReaderBuilder::new()
            .has_headers(false)
            .flexible(true)
            .comment(Some(b'#'))
            .terminator(csv::Terminator::Any(b'\n'))
            .from_reader(text.as_bytes());
        let mut records = Vec::new();
        let mut record = csv::StringRecord::new();
        while reader
            .read_record(&mut record)
            .map_err(|error| DataError::Read { file: file.to_owned(), message: error.to_string() })?
        {
            let fields: Vec<String> = record.iter().map(str::to_owned).collect();
            let inside: usize = fields.iter().map(|field| field.matches('\n').count()).sum();
            let ends = reader.position();
            if ends.byte() == text.len() as u64 {
                // All of the line ends from here on are the field's.
                let (line, column) = (ends.line() - inside as u64, fields.len());
                return Err(DataError::OpenQuote { file: file.to_owned(), line, column });
            }
            records.push(Row { line: ends.line().saturating_sub(1 + inside as u64).max(1), fields });
        }
        let mut records = records.into_iter();
        let Some(header) = records.next() else {
            return Err(DataError::Read { file: file.to_owned(), message: "empty, expected a header line".into() });
        };
        let columns: Vec<String> = header.fields.iter().map(|name| name.trim().to_owned()).collect();
        for (i, column) in columns.iter().enumerate() {
            let problem = match columns[..i].iter().position(|earlier| earlier == column) {
                _ if column.is_empty() => "empty".to_owned(),
                Some(earlier) => format!("\"{column}\" as is column {}", earlier + 1),
                None => continue,
            };
            return Err(DataError::Header { file: file.to_owned(), line: header.line, column: i + 1, problem });
        }
        let rows: Vec<Row> = records.collect();
        for row in &rows {
            let (have, want) = (row.fields.len(), columns.len());
            let what = match columns.get(have) {
                Some(column) => format!("column \"{column}\" is missing"),
                None if have > want => format!("field {} has no column", want + 1),
                None => continue,
            };
            return Err(DataError::Ragged { file: file.to_owned(), line: row.line, have, want, what });
        }
        Ok(Self { file: file.to_owned(), columns, rows, header_line: header.line })
    }

    /// Positions of columns by name.
    ///
    /// # Errors
    /// [`DataError::MissingColumn`].
    pub fn find<const N: usize>(&self, names: [&str; N]) -> Result<[usize; N], DataError> {
        let mut found = [0; N];
        for (position, name) in found.iter_mut().zip(names) {
            *position =
                self.columns.iter().position(|column| column == name).ok_or_else(|| DataError::MissingColumn {
                    file: self.file.clone(),
                    line: self.header_line,
                    column: name.to_owned(),
                    known: self.columns.join(", "),
                })?;
        }
        Ok(found)
    }

    /// A field of one of the sheet's rows.
    pub fn cell<'a>(&'a self, row: &'a Row, column: usize) -> Cell<'a> {
        Cell { sheet: self, line: row.line, column, text: row.fields[column].trim() }
    }
}

impl<'a> Cell<'a> {
    /// The error that this field is not one of the allowed values.
    pub fn refuse(&self, allowed: impl Into<String>) -> DataError {
        DataError::Value {
            file: self.sheet.file.clone(),
            line: self.line,
            column: self.sheet.columns[self.column].clone(),
            value: self.text.to_owned(),
            allowed: allowed.into(),
        }
    }

    /// Text that is not empty.
    ///
    /// # Errors
    /// [`DataError::Value`].
    pub fn filled(&self) -> Result<&'a str, DataError> {
        if self.text.is_empty() { Err(self.refuse("some text")) } else { Ok(self.text) }
    }

    /// A value that passes `legal`.
    ///
    /// # Errors
    /// [`DataError::Value`].
    pub fn required<T: FromStr>(&self, allowed: &str, legal: impl Fn(&T) -> bool) -> Result<T, DataError> {
        self.text.parse().ok().filter(legal).ok_or_else(|| self.refuse(allowed))
    }

    /// A value that passes `legal`, or nothing.
    ///
    /// # Errors
    /// [`DataError::Value`].
    pub fn optional<T: FromStr>(&self, allowed: &str, legal: impl Fn(&T) -> bool) -> Result<Option<T>, DataError> {
        if self.text.is_empty() { Ok(None) } else { self.required(allowed, legal).map(Some) }
    }
}

/// Text with LF line ends and without a byte order mark.
pub(super) fn plain(text: &str) -> String {
    text.strip_prefix('\u{feff}').unwrap_or(text).replace("\r\n", "\n")
}

pub(super) fn provenance(file: &str, text: Result<String, DataError>) -> Result<Provenance, DataError> {
    let refuse = |line: Option<usize>, problem: String| DataError::Provenance {
        file: line.map_or_else(|| file.to_owned(), |line| format!("{file}:{line}")),
        problem,
    };
    let text = text.map_err(|error| match error {
        DataError::Read { message, .. } => refuse(None, message),
        other => other,
    })?;
    let parsed: Result<ProvenanceFile, toml::de::Error> = toml::from_str(&text);
    let source = match parsed {
        Ok(parsed) => parsed.source,
        Err(error) => {
            let line = error.span().map(|span| text[..span.start].matches('\n').count() + 1);
            return Err(refuse(line, error.message().replace('\n', " ")));
        }
    };
    let empty = [("where", &source.place), ("protocol", &source.protocol), ("blake3", &source.blake3)];
    if let Some((key, _)) = empty.iter().find(|(_, value)| value.trim().is_empty()) {
        return Err(refuse(None, format!("{key} is empty")));
    }
    Ok(source)
}

/// The error that a CSV is no text from this byte on, by line and column.
fn not_text(file: &str, bytes: &[u8], at: usize) -> DataError {
    let lines: Vec<&[u8]> = bytes.split(|&byte| byte == b'\n').collect();
    let line = bytes[..at].split(|&byte| byte == b'\n').count();
    let begin = at - bytes[..at].rsplit(|&byte| byte == b'\n').next().map_or(0, <[u8]>::len);
    let field = bytes[begin..at].split(|&byte| byte == b',').count();
    let nth = |line: &[u8], field: usize| {
        let text = line.split(|&byte| byte == b',').nth(field - 1).unwrap_or_default();
        String::from_utf8_lossy(text).trim().to_owned()
    };
    let header = lines.iter().position(|line| !line.starts_with(b"#")).filter(|&header| header + 1 < line);
    let name = header.map(|header| nth(lines[header], field)).filter(|name| !name.is_empty());
    DataError::Value {
        file: file.to_owned(),
        line: line as u64,
        column: name.unwrap_or_else(|| format!("field {field}")),
        value: nth(lines[line - 1], field),
        allowed: format!("UTF-8 text; byte {} of the line is 0x{:02x}", at - begin + 1, bytes[at]),
    }
}
