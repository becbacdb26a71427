//! TOML read by hand, so that every error names file, line, column and key.

use crate::data::read_text;
use crate::error::ExperimentError;
use std::cell::RefCell;
use std::collections::BTreeSet;
use std::path::Path;
use toml::Spanned;
use toml::de::{DeTable, DeValue};

/// The text of a TOML file.
pub struct Document {
    file: String,
    text: String,
}

/// A table whose keys must all be used.
pub struct Table<'a> {
    document: &'a Document,
    path: String,
    start: usize,
    entries: &'a DeTable<'a>,
    used: RefCell<BTreeSet<String>>,
}

/// A value and the key that it belongs to.
#[derive(Clone)]
pub struct Node<'a> {
    document: &'a Document,
    key: String,
    start: usize,
    value: &'a DeValue<'a>,
}

impl Document {
    /// Reads a file.
    ///
    /// # Errors
    /// [`ExperimentError::Read`] when it cannot be read or is not UTF-8.
    pub fn read(file: &Path) -> Result<Self, ExperimentError> {
        let text = read_text(file).map_err(|message| ExperimentError::Read { file: file.to_owned(), message })?;
        Ok(Self::new(file.display().to_string(), &text))
    }

    /// A document from text; a byte order mark is dropped.
    pub fn new(file: String, text: &str) -> Self {
        Self { file, text: text.strip_prefix('\u{feff}').unwrap_or(text).to_owned() }
    }

    /// The text.
    pub fn text(&self) -> &str {
        &self.text
    }

    /// Parses the text.
    ///
    /// # Errors
    /// [`ExperimentError::Refused`] with line and column, for duplicate keys too.
    pub fn parse(&self) -> Result<Spanned<DeTable<'_>>, ExperimentError> {
        DeTable::parse(&self.text).map_err(|error| {
            let start = error.span().map_or(0, |span| span.start);
            self.refuse(start, "", &error.message().replace('\n', " "))
        })
    }

    /// The table of a parsed document.
    pub fn root<'a>(&'a self, parsed: &'a Spanned<DeTable<'a>>) -> Table<'a> {
        Table::new(self, String::new(), 0, parsed.get_ref())
    }

    fn refuse(&self, start: usize, key: &str, problem: &str) -> ExperimentError {
        ExperimentError::refused(self.place(start, key), problem)
    }

    fn place(&self, start: usize, key: &str) -> String {
        let before = self.text.get(..start).unwrap_or_default();
        let line = before.matches('\n').count() + 1;
        let column = before.rsplit('\n').next().unwrap_or("").chars().count() + 1;
        let key = if key.is_empty() { String::new() } else { format!(": {key}") };
        format!("{}:{line}:{column}{key}", self.file)
    }
}

impl<'a> Table<'a> {
    fn new(document: &'a Document, path: String, start: usize, entries: &'a DeTable<'a>) -> Self {
        Self { document, path, start, entries, used: RefCell::new(BTreeSet::new()) }
    }

    fn path(&self, key: &str) -> String {
        if self.path.is_empty() { key.to_owned() } else { format!("{}.{key}", self.path) }
    }

    /// The value of a key, if it is there.
    pub fn get(&self, key: &str) -> Option<Node<'a>> {
        self.used.borrow_mut().insert(key.to_owned());
        let (_, value) = self.entries.iter().find(|(name, _)| name.get_ref().as_ref() == key)?;
        Some(Node { document: self.document, key: self.path(key), start: value.span().start, value: value.get_ref() })
    }

    /// The value of a key that must be there.
    ///
    /// # Errors
    /// [`ExperimentError::Refused`].
    pub fn require(&self, key: &str) -> Result<Node<'a>, ExperimentError> {
        self.get(key).ok_or_else(|| self.document.refuse(self.start, &self.path(key), "missing"))
    }

    /// All keys and values in the order of the file, for tables whose keys are names.
    pub fn entries(&self) -> Vec<(String, Node<'a>)> {
        let mut entries: Vec<(usize, String)> =
            self.entries.iter().map(|(name, _)| (name.span().start, name.get_ref().to_string())).collect();
        entries.sort();
        entries.into_iter().filter_map(|(_, name)| self.get(&name).map(|node| (name, node))).collect()
    }

    /// Refuses keys that are not among these, before a key that is missing for being misspelt is.
    ///
    /// # Errors
    /// [`ExperimentError::Refused`] for the first of them.
    pub fn only(&self, known: &[&str]) -> Result<(), ExperimentError> {
        let unknown = self.entries.iter().filter(|(name, _)| !known.contains(&name.get_ref().as_ref()));
        match unknown.map(|(name, _)| (name.span().start, name.get_ref())).min() {
            None => Ok(()),
            Some((start, name)) => Err(self.document.refuse(
                start,
                &self.path(name),
                &format!("unknown key, allowed: {}", known.join(", ")),
            )),
        }
    }

    /// Refuses keys that nobody asked for.
    ///
    /// # Errors
    /// [`ExperimentError::Refused`] for the first of them.
    pub fn finish(&self) -> Result<(), ExperimentError> {
        self.only(&self.used.borrow().iter().map(String::as_str).collect::<Vec<_>>())
    }

    /// An error at the start of the table.
    pub fn refuse(&self, problem: &str) -> ExperimentError {
        self.document.refuse(self.start, &self.path, problem)
    }
}

impl<'a> Node<'a> {
    /// File, line, column and key of this value, for errors that are found later.
    pub fn place(&self) -> String {
        self.document.place(self.start, &self.key)
    }

    /// An error at this value.
    pub fn refuse(&self, problem: impl AsRef<str>) -> ExperimentError {
        self.document.refuse(self.start, &self.key, problem.as_ref())
    }

    /// The value as it is written, for messages.
    fn shown(&self) -> String {
        match self.value {
            DeValue::String(text) => format!("\"{text}\""),
            DeValue::Integer(number) => number.to_string(),
            DeValue::Float(number) => number.to_string(),
            DeValue::Boolean(value) => value.to_string(),
            DeValue::Datetime(value) => value.to_string(),
            DeValue::Array(_) => "a list".into(),
            DeValue::Table(_) => "a table".into(),
        }
    }

    /// Text.
    ///
    /// # Errors
    /// [`ExperimentError::Refused`] for another type, and for no text at all.
    pub fn text(&self) -> Result<&'a str, ExperimentError> {
        match self.value {
            DeValue::String(text) if !text.trim().is_empty() => Ok(text),
            _ => Err(self.refuse(format!("{}, allowed: some text", self.shown()))),
        }
    }

    /// One of these words.
    ///
    /// # Errors
    /// [`ExperimentError::Refused`] for anything else.
    pub fn word<T: Copy>(&self, words: &[(&str, T)]) -> Result<T, ExperimentError> {
        let found = match self.value {
            DeValue::String(text) => words.iter().find(|(word, _)| *word == text.as_ref()),
            _ => None,
        };
        let known = || words.iter().map(|(word, _)| format!("\"{word}\"")).collect::<Vec<_>>().join(", ");
        found.map(|&(_, value)| value).ok_or_else(|| self.refuse(format!("{}, allowed: {}", self.shown(), known())))
    }

    /// `true` or `false`.
    ///
    /// # Errors
    /// [`ExperimentError::Refused`] for anything else.
    pub fn boolean(&self) -> Result<bool, ExperimentError> {
        self.value.as_bool().ok_or_else(|| self.refuse(format!("{}, allowed: true or false", self.shown())))
    }

    /// A whole number in a range.
    ///
    /// # Errors
    /// [`ExperimentError::Refused`] for anything else.
    pub fn whole(&self, min: u64, max: u64) -> Result<u64, ExperimentError> {
        let number = match self.value {
            DeValue::Integer(number) => {
                u64::from_str_radix(number.as_str().replace('_', "").trim_start_matches('+'), number.radix()).ok()
            }
            _ => None,
        };
        number
            .filter(|number| (min..=max).contains(number))
            .ok_or_else(|| self.refuse(format!("{}, allowed: a whole number from {min} to {max}", self.shown())))
    }

    /// A finite number.
    ///
    /// # Errors
    /// [`ExperimentError::Refused`] for anything else.
    pub fn number(&self) -> Result<f64, ExperimentError> {
        let text = match self.value {
            DeValue::Integer(number) if number.radix() == 10 => number.as_str(),
            DeValue::Float(number) => number.as_str(),
            _ => "",
        };
        let number: Option<f64> = text.replace('_', "").parse().ok().filter(|number: &f64| number.is_finite());
        number.ok_or_else(|| self.refuse(format!("{}, allowed: a finite number", self.shown())))
    }

    /// A number, truth value or text, written as on the command line.
    ///
    /// # Errors
    /// [`ExperimentError::Refused`] for lists, tables and dates.
    pub fn scalar(&self) -> Result<String, ExperimentError> {
        match self.value {
            DeValue::String(text) => Ok(text.to_string()),
            DeValue::Integer(_) | DeValue::Float(_) | DeValue::Boolean(_) => Ok(self.shown()),
            _ => Err(self.refuse(format!("{}, allowed: a number, a word, true or false", self.shown()))),
        }
    }

    /// A table, if it is one.
    pub fn table(&self) -> Option<Table<'a>> {
        self.value.as_table().map(|entries| Table::new(self.document, self.key.clone(), self.start, entries))
    }

    /// The elements of a list, or the value itself.
    ///
    /// # Errors
    /// [`ExperimentError::Refused`] for an empty list and for scalars that stand twice.
    pub fn list(&self) -> Result<Vec<Self>, ExperimentError> {
        let DeValue::Array(elements) = self.value else { return Ok(vec![self.clone()]) };
        let nodes: Vec<Self> = elements
            .iter()
            .map(|element| Self {
                document: self.document,
                key: self.key.clone(),
                start: element.span().start,
                value: element.get_ref(),
            })
            .collect();
        if nodes.is_empty() {
            return Err(self.refuse("an empty list, allowed: one value or more"));
        }
        let mut seen = BTreeSet::new();
        for node in &nodes {
            if let Ok(text) = node.scalar()
                && !seen.insert(text.clone())
            {
                return Err(node.refuse(format!("{text} stands twice in the list")));
            }
        }
        Ok(nodes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn error(text: &str, read: impl Fn(&Table<'_>) -> Result<(), ExperimentError>) -> String {
        let document = Document::new("x.toml".into(), text);
        let result = document.parse().and_then(|parsed| {
            let root = document.root(&parsed);
            read(&root).and_then(|()| root.finish())
        });
        result.expect_err("a refusal").to_string()
    }

    #[test]
    fn errors_name_line_column_and_key() {
        let whole = |root: &Table<'_>| root.require("m")?.whole(1, 8).map(drop);
        assert_eq!(error("\nm = 9", whole), "x.toml:2:5: m: 9, allowed: a whole number from 1 to 8");
        assert_eq!(error("m = -1", whole), "x.toml:1:5: m: -1, allowed: a whole number from 1 to 8");
        assert_eq!(error("m = nan", whole), "x.toml:1:5: m: nan, allowed: a whole number from 1 to 8");
        assert_eq!(error("m = 1.5", whole), "x.toml:1:5: m: 1.5, allowed: a whole number from 1 to 8");
        assert_eq!(error("m = 1\n  k = 2", whole), "x.toml:2:3: k: unknown key, allowed: m");
        assert_eq!(error("n = 1", whole), "x.toml:1:1: m: missing");
        assert_eq!(error("m = 1\nm = 2", whole), "x.toml:2:1: duplicate key");
        assert!(error("m = ", whole).starts_with("x.toml:1:"), "{}", error("m = ", whole));
    }

    #[test]
    fn lists_refuse_repetition_and_emptiness() {
        let list = |root: &Table<'_>| root.require("m")?.list().map(drop);
        assert_eq!(error("m = [1, 2, 1]", list), "x.toml:1:12: m: 1 stands twice in the list");
        assert_eq!(error("m = []", list), "x.toml:1:5: m: an empty list, allowed: one value or more");
    }
}
