//! Scale, masks, soft cap and page size, from flags and from a file's metadata: one parser per setting serves both.

use std::collections::HashMap;

use paged_attention::{PageSize, SOFTCAP_MAX, SOFTCAP_MIN};

use crate::args::SettingFlags;
use crate::error::InputError;

/// One side of a window: so many keys, or all.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Side(pub Option<u32>);

/// A soft cap, or none.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Cap(pub Option<f64>);

/// What flags and metadata say together.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Settings {
    /// Bottom-right aligned causal mask.
    pub causal: bool,
    /// The factor of `q . k`; the geometry's default where none is given.
    pub scale: Option<f64>,
    /// Keys visible to the left of a row's own position.
    pub window_left: Option<u32>,
    /// Keys visible to the right of it.
    pub window_right: Option<u32>,
    /// The soft cap.
    pub softcap: Option<f64>,
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

/// `-1`, or a whole number.
pub fn parse_window(text: &str) -> Result<Side, String> {
    match text.parse::<i64>() {
        Ok(-1) => Ok(Side(None)),
        Ok(keys) => u32::try_from(keys).map(|keys| Side(Some(keys))).map_err(|_| ()),
        Err(_) => Err(()),
    }
    .map_err(|()| format!("a whole number from 0 to {}, or -1 for no limit, is needed", u32::MAX))
}

/// `0`, or a number in the range that the library supports.
pub fn parse_softcap(text: &str) -> Result<Cap, String> {
    match text.parse::<f64>() {
        Ok(0.0) => Ok(Cap(None)),
        Ok(cap) if (SOFTCAP_MIN..=SOFTCAP_MAX).contains(&cap) => Ok(Cap(Some(cap))),
        _ => Err(format!("a number from {SOFTCAP_MIN:.2e} to {SOFTCAP_MAX:.2e}, or 0 for none, is needed")),
    }
}

/// A whole number from 1.
pub fn parse_page_size(text: &str) -> Result<PageSize, String> {
    let tokens: u32 = text.parse().map_err(|_| format!("a whole number from 1 to {} is needed", u32::MAX))?;
    PageSize::new(tokens).map_err(|error| error.to_string())
}

/// Reads the metadata under the flags: a value that a flag replaces is not even looked at. Unknown keys are ignored.
pub fn resolve(flags: &SettingFlags, metadata: &HashMap<String, String>) -> Result<Settings, InputError> {
    let causal = setting(flags.causal, metadata, "causal", parse_causal)?;
    let scale = setting(flags.scale, metadata, "scale", parse_scale)?;
    let window_left = setting(flags.window_left, metadata, "window_left", parse_window)?;
    let window_right = setting(flags.window_right, metadata, "window_right", parse_window)?;
    let softcap = setting(flags.softcap, metadata, "softcap", parse_softcap)?;
    Ok(Settings {
        causal: causal.unwrap_or(false),
        scale,
        window_left: window_left.and_then(|side| side.0),
        window_right: window_right.and_then(|side| side.0),
        softcap: softcap.and_then(|cap| cap.0),
    })
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
    fn values_are_read_and_others_refused() {
        for (text, side) in [("-1", None), ("0", Some(0)), ("128", Some(128)), ("4294967295", Some(u32::MAX))] {
            assert_eq!(parse_window(text), Ok(Side(side)), "{text}");
        }
        for text in ["-2", "", "1.5", "-1.0", "nan", "4294967296", "99999999999999999999"] {
            assert!(parse_window(text).unwrap_err().contains("-1 for no limit, is needed"), "{text}");
        }
        for text in ["0", "0.0", "-0", "0e5"] {
            assert_eq!(parse_softcap(text), Ok(Cap(None)), "{text}");
        }
        assert_eq!(parse_softcap("30"), Ok(Cap(Some(30.0))));
        for text in ["-1", "nan", "inf", "", "x", "1e-30", "1e30"] {
            assert!(parse_softcap(text).unwrap_err().contains("0 for none, is needed"), "{text}");
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
            ("softcap".to_owned(), "30".to_owned()),
            ("made_by".to_owned(), "a tool".to_owned()),
        ]);
        assert!(resolve(&SettingFlags::default(), &metadata).is_err());
        let flags = SettingFlags {
            causal: Some(true),
            scale: Some(0.5),
            softcap: Some(Cap(None)),
            window_right: Some(Side(Some(3))),
            ..SettingFlags::default()
        };
        let resolved = resolve(&flags, &metadata).unwrap();
        let sides = (Some(7), Some(3));
        let Settings { causal, scale, window_left, window_right, softcap } = resolved;
        assert_eq!((causal, scale, (window_left, window_right), softcap), (true, Some(0.5), sides, None));
        let no_limit = SettingFlags { window_left: Some(Side(None)), ..flags };
        assert_eq!(resolve(&no_limit, &metadata).unwrap(), Settings { window_left: None, ..resolved });
    }
}
