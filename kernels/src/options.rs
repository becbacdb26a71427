//! Options of a kernel: typed, listed, validated by name.

use std::collections::BTreeMap;
use std::fmt;

/// Which of the two complete sets of options a schedule starts from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum OptionSet {
    /// As the published kernel is known to be, helpers and hazards included.
    Published,
    /// Our best schedule of those that the device code runs: no needless gate, put sources protected, consumption order
    /// equal to arrival order, symmetric, no multicast.
    Tilewire,
}

impl OptionSet {
    /// The name used on the command line.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Published => "published",
            Self::Tilewire => "tilewire",
        }
    }
}

/// Legal values of an option.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Values {
    /// `true` or `false`.
    Bool,
    /// An integer in an inclusive range.
    Int {
        /// Smallest value.
        min: u64,
        /// Largest value.
        max: u64,
    },
    /// One of these words.
    Words(&'static [&'static str]),
}

impl fmt::Display for Values {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Bool => f.write_str("true or false"),
            Self::Int { min, max } => write!(f, "an integer from {min} to {max}"),
            Self::Words(words) => write!(f, "one of {}", words.join(", ")),
        }
    }
}

/// A named option.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OptionSpec {
    /// Name, as in `--set name=value`.
    pub name: &'static str,
    /// What it changes, one sentence.
    pub doc: &'static str,
    /// Legal values.
    pub values: Values,
}

/// The value of an option.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Value {
    /// Of a [`Values::Bool`] option.
    Bool(bool),
    /// Of a [`Values::Int`] option.
    Int(u64),
    /// Of a [`Values::Words`] option.
    Word(&'static str),
}

impl fmt::Display for Value {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Bool(value) => write!(f, "{value}"),
            Self::Int(value) => write!(f, "{value}"),
            Self::Word(word) => f.write_str(word),
        }
    }
}

/// Why an option was refused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum OptionError {
    /// The kernel lists no such option.
    #[error("kernel {kernel} has no option \"{name}\"; it has {known}")]
    Unknown {
        /// Kernel.
        kernel: &'static str,
        /// Name asked for.
        name: String,
        /// Names that exist.
        known: String,
    },
    /// The value is not legal.
    #[error("option {name} of {kernel} is \"{got}\"; allowed: {allowed}")]
    Value {
        /// Kernel.
        kernel: &'static str,
        /// Option.
        name: &'static str,
        /// Value asked for.
        got: String,
        /// Legal values.
        allowed: String,
    },
    /// Nothing depends on the option.
    #[error("option {name} of {kernel} is {got}, which changes nothing {why}; leave it at {default}")]
    Unused {
        /// Kernel.
        kernel: &'static str,
        /// Option.
        name: &'static str,
        /// Value asked for.
        got: Value,
        /// Where, and why there.
        why: &'static str,
        /// Value that goes without saying.
        default: Value,
    },
}

/// A value for every option that a kernel lists.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Options {
    kernel: &'static str,
    specs: &'static [OptionSpec],
    values: BTreeMap<&'static str, Value>,
}

impl Options {
    /// Options from a default for each spec.
    ///
    /// # Panics
    /// When `default` returns a value that the spec does not allow: a mistake in the kernel's file.
    pub fn new(
        kernel: &'static str,
        specs: &'static [OptionSpec],
        mut default: impl FnMut(&'static str) -> Value,
    ) -> Self {
        let mut values = BTreeMap::new();
        for spec in specs {
            let value = default(spec.name);
            assert_eq!(parse(spec, &value.to_string()), Some(value), "default of {} in {kernel}", spec.name);
            values.insert(spec.name, value);
        }
        Self { kernel, specs, values }
    }

    /// Sets one option from text.
    ///
    /// # Errors
    /// [`OptionError`] when the kernel lists no such option or the value is not legal.
    pub fn set(&mut self, name: &str, text: &str) -> Result<(), OptionError> {
        let Some(spec) = self.specs.iter().find(|spec| spec.name == name) else {
            let known = self.specs.iter().map(|spec| spec.name).collect::<Vec<_>>().join(", ");
            return Err(OptionError::Unknown { kernel: self.kernel, name: name.to_owned(), known });
        };
        let value = parse(spec, text).ok_or_else(|| OptionError::Value {
            kernel: self.kernel,
            name: spec.name,
            got: text.to_owned(),
            allowed: spec.values.to_string(),
        })?;
        self.values.insert(spec.name, value);
        Ok(())
    }

    /// A boolean option.
    ///
    /// # Panics
    /// When the kernel lists no such boolean: a mistake in the kernel's file.
    pub fn flag(&self, name: &str) -> bool {
        match self.values.get(name) {
            Some(Value::Bool(value)) => *value,
            other => panic!("{}: {name} is {other:?}, not a boolean option", self.kernel),
        }
    }

    /// An integer option.
    ///
    /// # Panics
    /// When the kernel lists no such integer: a mistake in the kernel's file.
    pub fn int(&self, name: &str) -> u64 {
        match self.values.get(name) {
            Some(Value::Int(value)) => *value,
            other => panic!("{}: {name} is {other:?}, not an integer option", self.kernel),
        }
    }

    /// A word option.
    ///
    /// # Panics
    /// When the kernel lists no such word option: a mistake in the kernel's file.
    pub fn word(&self, name: &str) -> &'static str {
        match self.values.get(name) {
            Some(Value::Word(word)) => word,
            other => panic!("{}: {name} is {other:?}, not a word option", self.kernel),
        }
    }

    /// All options with their values, by name.
    pub fn iter(&self) -> impl Iterator<Item = (&'static str, Value)> + '_ {
        self.values.iter().map(|(&name, &value)| (name, value))
    }
}

impl fmt::Display for Options {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (i, (name, value)) in self.iter().enumerate() {
            let comma = if i == 0 { "" } else { "," };
            write!(f, "{comma}{name}={value}")?;
        }
        Ok(())
    }
}

fn parse(spec: &OptionSpec, text: &str) -> Option<Value> {
    match spec.values {
        Values::Bool => text.parse().ok().map(Value::Bool),
        Values::Int { min, max } => text.parse().ok().filter(|v| (min..=max).contains(v)).map(Value::Int),
        Values::Words(words) => words.iter().find(|&&word| word == text).map(|&word| Value::Word(word)),
    }
}
