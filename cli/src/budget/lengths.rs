//! `--lengths`.

use std::fmt;
use std::path::{Path, PathBuf};

use paged_attention::budget::Lengths;

use super::Unusable;
use crate::inputs;

/// Where the lengths come from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Source {
    /// `uniform:FIRST:LAST`.
    Uniform(u32, u32),
    /// `fixed:TOKENS`.
    Fixed(u32),
    /// `file:PATH`, not read yet.
    File(PathBuf),
}

impl fmt::Display for Source {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Uniform(first, last) => write!(f, "uniform:{first}:{last}"),
            Self::Fixed(tokens) => write!(f, "fixed:{tokens}"),
            Self::File(path) => write!(f, "file:{}", path.display()),
        }
    }
}

/// Parses `--lengths`.
pub fn parse(text: &str) -> Result<Source, String> {
    let number = |text: &str| text.parse().map_err(|_| format!("`{text}`: {NUMBER} is needed"));
    match text.split_once(':') {
        Some(("uniform", range)) => {
            let (first, last) = range.split_once(':').ok_or("uniform:FIRST:LAST is needed")?;
            Ok(Source::Uniform(number(first)?, number(last)?))
        }
        Some(("fixed", tokens)) => Ok(Source::Fixed(number(tokens)?)),
        Some(("file", path)) if !path.is_empty() => Ok(Source::File(path.into())),
        _ => Err("uniform:FIRST:LAST, fixed:TOKENS or file:PATH is needed".to_owned()),
    }
}

const NUMBER: &str = "a whole number from 1 to 4294967295";

impl Source {
    /// The lengths themselves.
    pub fn load(&self) -> Result<Lengths, Unusable> {
        match self {
            Self::Uniform(first, last) => Ok(Lengths::uniform(*first, *last)?),
            Self::Fixed(tokens) => Ok(Lengths::fixed(*tokens)?),
            Self::File(path) => read(path),
        }
    }
}

/// A length per line; empty lines are passed over.
fn read(path: &Path) -> Result<Lengths, Unusable> {
    let bytes = inputs::read(path).map_err(|error| Unusable::File { path: path.to_owned(), error })?;
    let text = String::from_utf8_lossy(&bytes);
    let lines = (1..).zip(text.lines().map(str::trim)).filter(|(_, line)| !line.is_empty());
    let lengths: Result<Vec<u32>, Unusable> = lines
        .map(|(number, line)| match line.parse() {
            Ok(tokens) if tokens > 0 => Ok(tokens),
            _ => {
                let found = line.chars().take(40).collect();
                Err(Unusable::Line { path: path.to_owned(), number, found, needed: NUMBER })
            }
        })
        .collect();
    Lengths::observed(lengths?).map_err(|error| Unusable::Lengths { path: path.to_owned(), error })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sources() {
        for (text, source) in [
            ("uniform:1:512", Source::Uniform(1, 512)),
            ("fixed:7", Source::Fixed(7)),
            ("file:a:b.txt", Source::File("a:b.txt".into())),
        ] {
            assert_eq!(parse(text), Ok(source.clone()));
            assert_eq!(source.to_string(), text);
        }
        for (text, says) in [
            ("", "file:PATH"),
            ("512", "file:PATH"),
            ("file:", "file:PATH"),
            ("normal:1:2", "file:PATH"),
            ("uniform:512", "FIRST:LAST"),
            ("uniform:1:2:3", "`2:3`"),
            ("uniform:-1:3", "`-1`"),
            ("fixed:4294967296", "4294967295"),
            ("fixed:1.5", "whole number"),
        ] {
            let error = parse(text).unwrap_err();
            assert!(error.contains(says), "{text}: {error}");
        }
    }
}
