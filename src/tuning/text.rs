//! A table as text, and back.

use std::fmt;
use std::iter::Peekable;
use std::str::FromStr;

use super::{Timing, Tuning, TuningEntry, TuningError, TuningKey, one_line};
use crate::kernels::{KernelShape, NameError};

/// The first line; the number changes when an older crate could misread the rest.
const FIRST: &str = "paged-attention tuning 1";

impl<V: fmt::Display> fmt::Display for Timing<V> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} run_ms={} compile_ms={}", self.variant, self.run_ms, self.compile_ms)
    }
}

impl fmt::Display for TuningEntry {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{}", self.shape)?;
        self.prefill.iter().try_for_each(|timing| writeln!(f, "  {timing}"))?;
        self.decode.iter().try_for_each(|timing| writeln!(f, "  {timing}"))
    }
}

impl fmt::Display for Tuning {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let TuningKey { version, adapter, backend, driver } = &self.key;
        writeln!(f, "{FIRST}")?;
        writeln!(f, "version {version}\nadapter {adapter}\nbackend {backend}\ndriver {driver}\n")?;
        writeln!(f, "# The first prefill and the first decode of a shape are used.")?;
        self.entries.iter().try_for_each(|entry| write!(f, "{entry}"))
    }
}

/// Lines that say something, with their numbers.
struct Lines<'a, I: Iterator<Item = (usize, &'a str)>> {
    lines: Peekable<I>,
    /// The number of the line after the last.
    end: usize,
}

impl<'a, I: Iterator<Item = (usize, &'a str)>> Lines<'a, I> {
    /// The next line, or what there is at the end.
    fn here(&mut self) -> (usize, &'a str) {
        self.lines.peek().copied().unwrap_or((self.end, ""))
    }

    fn refuse(&mut self, needed: &'static str) -> TuningError {
        let (line, found) = self.here();
        TuningError::Line { line, found: found.to_owned(), needed }
    }

    /// What `parse` makes of the next line.
    fn parsed<T>(
        &mut self,
        needed: &'static str,
        parse: impl FnOnce(&'a str) -> Result<Option<T>, NameError>,
    ) -> Result<T, TuningError> {
        let (line, text) = self.here();
        match parse(text) {
            Ok(Some(parsed)) => {
                self.lines.next();
                Ok(parsed)
            }
            Ok(None) => Err(self.refuse(needed)),
            Err(NameError { found, needed }) => Err(TuningError::Line { line, found, needed }),
        }
    }

    /// The rest of a line that starts with `word`.
    fn field(&mut self, word: &str, needed: &'static str) -> Result<String, TuningError> {
        self.parsed(needed, |line| {
            let rest = line.strip_prefix(word).filter(|rest| rest.is_empty() || rest.starts_with(' '));
            Ok(rest.map(one_line))
        })
    }

    /// The lines of variants whose names start with `kernel`: at least one, each variant once.
    fn timings<V: FromStr<Err = NameError> + PartialEq>(
        &mut self,
        kernel: &str,
        needed: &'static str,
    ) -> Result<Vec<Timing<V>>, TuningError> {
        let mut timings: Vec<Timing<V>> = Vec::new();
        while timings.is_empty() || self.here().1.starts_with(kernel) {
            let (line, found) = self.here();
            let timing = self.parsed(needed, timing::<V>)?;
            if timings.iter().any(|known| known.variant == timing.variant) {
                let needed = "a variant that the shape does not have yet";
                return Err(TuningError::Line { line, found: found.to_owned(), needed });
            }
            timings.push(timing);
        }
        Ok(timings)
    }
}

/// `NAME run_ms=.. compile_ms=..`
fn timing<V: FromStr<Err = NameError>>(line: &str) -> Result<Option<Timing<V>>, NameError> {
    let mut words = line.split_whitespace();
    let Some(name) = words.next() else { return Ok(None) };
    let variant = name.parse()?;
    let mut time = |key: &str| {
        let ms: f64 = words.next()?.strip_prefix(key)?.strip_prefix('=')?.parse().ok()?;
        (ms.is_finite() && ms >= 0.0).then_some(ms)
    };
    let (run_ms, compile_ms) = (time("run_ms"), time("compile_ms"));
    Ok(match (run_ms, compile_ms, words.next()) {
        (Some(run_ms), Some(compile_ms), None) => Some(Timing { variant, run_ms, compile_ms }),
        _ => None,
    })
}

impl FromStr for Tuning {
    type Err = TuningError;

    fn from_str(text: &str) -> Result<Self, TuningError> {
        let numbered = (1..).zip(text.lines().map(str::trim));
        let lines = numbered.filter(|(_, line)| !line.is_empty() && !line.starts_with('#')).peekable();
        let mut lines = Lines { lines, end: text.lines().count() + 1 };
        lines.parsed("`paged-attention tuning 1`", |line| Ok((line == FIRST).then_some(())))?;
        let key = TuningKey {
            version: lines.field("version", "`version` and that of the crate")?,
            adapter: lines.field("adapter", "`adapter` and its name")?,
            backend: lines.field("backend", "`backend` and its name")?,
            driver: lines.field("driver", "`driver` and its name")?,
        };
        let mut entries: Vec<TuningEntry> = Vec::new();
        while lines.lines.peek().is_some() {
            let (line, found) = lines.here();
            let shape: KernelShape = lines.parsed("a shape", |line| line.parse().map(Some))?;
            if entries.iter().any(|entry| entry.shape == shape) {
                let needed = "a shape that the table does not have yet";
                return Err(TuningError::Line { line, found: found.to_owned(), needed });
            }
            let prefill = lines.timings("prefill-", "a prefill variant with run_ms=.. and compile_ms=..")?;
            let decode = lines.timings("decode-", "a decode variant with run_ms=.. and compile_ms=..")?;
            // There is at least one of each.
            entries.extend(TuningEntry::in_order(shape, prefill, decode));
        }
        Ok(Self { key, entries })
    }
}
