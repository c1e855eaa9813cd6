//! Scale, mask and page size, from flags and from a file's metadata: one parser per setting serves both.

use std::collections::HashMap;

use paged_attention::PageSize;

use crate::args::{Layout, PagingFlags, SettingFlags};
use crate::error::InputError;

/// A window of `-1`: all keys.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Unlimited;

/// A soft cap of `0`: off.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Uncapped;

/// What flags and metadata say together.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Settings {
    /// Bottom-right aligned causal mask.
    pub causal: bool,
    /// The factor of `q . k`; the geometry's default where none is given.
    pub scale: Option<f64>,
}

/// `true` or `false`.
pub fn parse_causal(text: &str) -> Result<bool, String> {
    text.parse().map_err(|_| {
        "`true` or `false` is needed (before a file's name, write --causal=true; alone at the end, --causal will do)".to_owned()
    })
}

/// A finite number.
pub fn parse_scale(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(scale) if scale.is_finite() => Ok(scale),
        _ => Err("a finite number is needed".to_owned()),
    }
}

/// `-1`; whole numbers from 0 are what the option will take one day.
pub fn parse_window(text: &str) -> Result<Unlimited, String> {
    match text.parse::<i64>() {
        Ok(-1) => Ok(Unlimited),
        Ok(0..) => Err("a window is not supported yet; -1 (no limit) is".to_owned()),
        _ => Err("a whole number, or -1 for no limit, is needed".to_owned()),
    }
}

/// `0`; finite numbers above are what the option will take one day.
pub fn parse_softcap(text: &str) -> Result<Uncapped, String> {
    match text.parse::<f64>() {
        Ok(0.0) => Ok(Uncapped),
        Ok(cap) if cap.is_finite() && cap > 0.0 => Err("a soft cap is not supported yet; 0 (off) is".to_owned()),
        _ => Err("a finite number from 0 (off) is needed".to_owned()),
    }
}

/// A whole number from 1.
pub fn parse_page_size(text: &str) -> Result<PageSize, String> {
    let tokens: u32 = text.parse().map_err(|_| format!("a whole number from 1 to {} is needed", u32::MAX))?;
    PageSize::new(tokens).map_err(|error| error.to_string())
}

/// Flags that can be refused without looking at a file.
pub fn check_flags(paging: &PagingFlags) -> Result<(), InputError> {
    use crate::args::KvDtype::{Fp8, Int8};
    if let Some(dtype @ (Int8 | Fp8)) = paging.kv_dtype {
        return Err(InputError::Unsupported {
            what: format!("--kv-dtype {}", dtype.name()),
            instead: "the type that the file's keys and values have is",
        });
    }
    if paging.layout == Some(Layout::Slot) {
        return Err(InputError::Unsupported {
            what: "--layout slot".to_owned(),
            instead: "`head` ([page, head, slot, dim]) is",
        });
    }
    Ok(())
}

/// Reads the metadata under the flags: a value that a flag replaces is not even looked at. Unknown keys are ignored.
pub fn resolve(flags: &SettingFlags, metadata: &HashMap<String, String>) -> Result<Settings, InputError> {
    let causal = setting(flags.causal, metadata, "causal", parse_causal)?;
    let scale = setting(flags.scale, metadata, "scale", parse_scale)?;
    setting(flags.window_left, metadata, "window_left", parse_window)?;
    setting(flags.window_right, metadata, "window_right", parse_window)?;
    setting(flags.softcap, metadata, "softcap", parse_softcap)?;
    Ok(Settings { causal: causal.unwrap_or(false), scale })
}

fn setting<T>(
    flag: Option<T>,
    metadata: &HashMap<String, String>,
    key: &'static str,
    parse: fn(&str) -> Result<T, String>,
) -> Result<Option<T>, InputError> {
    match (flag, metadata.get(key)) {
        (None, Some(found)) => {
            parse(found).map(Some).map_err(|needed| InputError::Metadata { key, found: found.clone(), needed })
        }
        (flag, _) => Ok(flag),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn neutral_values_are_accepted_and_others_are_not() {
        assert_eq!(parse_window("-1"), Ok(Unlimited));
        for text in ["0", "128"] {
            assert!(parse_window(text).unwrap_err().contains("not supported yet"), "{text}");
        }
        for text in ["-2", "", "1.5", "-1.0", "nan", "99999999999999999999"] {
            assert!(parse_window(text).unwrap_err().contains("is needed"), "{text}");
        }
        for text in ["0", "0.0", "-0", "0e5"] {
            assert_eq!(parse_softcap(text), Ok(Uncapped), "{text}");
        }
        assert!(parse_softcap("30").unwrap_err().contains("not supported yet"));
        for text in ["-1", "nan", "inf", "", "x"] {
            assert!(parse_softcap(text).unwrap_err().contains("is needed"), "{text}");
        }
        for text in ["nan", "inf", "-inf", "1e999", "", "1,5", "NaN"] {
            assert!(parse_scale(text).is_err(), "{text}");
        }
        assert_eq!(parse_scale("-1.25e-1"), Ok(-0.125));
        for text in ["True", "1", "", "yes"] {
            assert!(parse_causal(text).is_err(), "{text}");
        }
        for text in ["0", "-1", "4294967296", "1.0", ""] {
            assert!(parse_page_size(text).is_err(), "{text}");
        }
    }

    #[test]
    fn flags_win_and_hide_bad_metadata() {
        let metadata = HashMap::from([
            ("causal".to_owned(), "perhaps".to_owned()),
            ("scale".to_owned(), "nan".to_owned()),
            ("window_left".to_owned(), "7".to_owned()),
            ("made_by".to_owned(), "a tool".to_owned()),
        ]);
        assert!(resolve(&SettingFlags::default(), &metadata).is_err());
        let flags = SettingFlags {
            causal: Some(true),
            scale: Some(0.5),
            window_left: Some(Unlimited),
            ..SettingFlags::default()
        };
        assert_eq!(resolve(&flags, &metadata).unwrap(), Settings { causal: true, scale: Some(0.5) });
    }
}
