//! The names of variants and shapes: one text for reports, tables, options and error messages, that can be read back.

use std::fmt;
use std::str::FromStr;

use thiserror::Error;

use super::KernelShape;
use super::variant::{DecodeVariant, ItemOrder, PrefillVariant, UNSPLIT, Variants};
use crate::geometry::{Dtype, HeadGeometry};
use crate::kv::KvDtypes;

/// A text that names no variant or shape.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error("found {found:?}; {needed} is needed")]
pub struct NameError {
    /// The text found.
    pub found: String,
    /// What is needed.
    pub needed: &'static str,
}

/// `parsed`, if it was read from the very name that it has: there is one name for each thing.
fn named<T: fmt::Display>(
    name: &str,
    needed: &'static str,
    parsed: Option<T>,
    check: impl FnOnce(&T) -> Result<(), &'static str>,
) -> Result<T, NameError> {
    let refuse = |needed| NameError { found: name.to_owned(), needed };
    let parsed = parsed.filter(|parsed| parsed.to_string() == name).ok_or_else(|| refuse(needed))?;
    check(&parsed).map_err(refuse)?;
    Ok(parsed)
}

/// `prefill-broadcast8-r3k2l16s32768a`: subgroups of 8 (`prefill-uniform` has none), 3 rows per lane, 2 keys per step, 16
/// lanes; `s`, keys per split, is left out where keys are not split; `a` is there where large and small items
/// alternate.
impl fmt::Display for PrefillVariant {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { subgroup, lanes, rows_per_lane, step_keys, split_keys, order } = self;
        match subgroup {
            0 => write!(f, "prefill-uniform")?,
            _ => write!(f, "prefill-broadcast{subgroup}")?,
        }
        write!(f, "-r{rows_per_lane}k{step_keys}l{lanes}")?;
        if *split_keys != UNSPLIT {
            write!(f, "s{split_keys}")?;
        }
        match order {
            ItemOrder::LargeFirst => Ok(()),
            ItemOrder::Alternating => write!(f, "a"),
        }
    }
}

impl FromStr for PrefillVariant {
    type Err = NameError;

    fn from_str(name: &str) -> Result<Self, NameError> {
        let parse = || {
            let (kind, sizes) = name.strip_prefix("prefill-")?.split_once('-')?;
            let subgroup = match kind {
                "uniform" => 0,
                _ => kind.strip_prefix("broadcast")?.parse().ok()?,
            };
            let (sizes, order) = match sizes.strip_suffix('a') {
                Some(sizes) => (sizes, ItemOrder::Alternating),
                None => (sizes, ItemOrder::LargeFirst),
            };
            let (sizes, split_keys) = match sizes.split_once('s') {
                Some((sizes, split_keys)) => (sizes, split_keys.parse().ok()?),
                None => (sizes, UNSPLIT),
            };
            let (sizes, lanes) = sizes.split_once('l')?;
            let (rows, keys) = sizes.strip_prefix('r')?.split_once('k')?;
            let (lanes, rows_per_lane, step_keys) = (lanes.parse().ok()?, rows.parse().ok()?, keys.parse().ok()?);
            Some(Self { subgroup, lanes, rows_per_lane, step_keys, split_keys, order })
        };
        named(name, "a prefill variant such as prefill-broadcast32-r1k4l64", parse(), Self::check)
    }
}

/// `decode-workgroup`, `decode-streams8` or `decode-exchange32`, with the subgroup size.
impl fmt::Display for DecodeVariant {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Workgroup => write!(f, "decode-workgroup"),
            Self::Streams { subgroup } => write!(f, "decode-streams{subgroup}"),
            Self::Exchange { subgroup } => write!(f, "decode-exchange{subgroup}"),
        }
    }
}

impl FromStr for DecodeVariant {
    type Err = NameError;

    fn from_str(name: &str) -> Result<Self, NameError> {
        let parse = || {
            let kind = name.strip_prefix("decode-")?;
            let sized = |kind_name| kind.strip_prefix(kind_name).and_then(|size: &str| size.parse().ok());
            match (kind, sized("streams"), sized("exchange")) {
                ("workgroup", ..) => Some(Self::Workgroup),
                (_, Some(subgroup), _) => Some(Self::Streams { subgroup }),
                (_, _, Some(subgroup)) => Some(Self::Exchange { subgroup }),
                _ => None,
            }
        };
        let needed = "a decode variant (decode-workgroup, decode-streamsN or decode-exchangeN)";
        named(name, needed, parse(), |variant| variant.check())
    }
}

/// The two names, joined by `+`.
impl fmt::Display for Variants {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}+{}", self.prefill, self.decode)
    }
}

impl FromStr for Variants {
    type Err = NameError;

    fn from_str(name: &str) -> Result<Self, NameError> {
        let needed = "a prefill and a decode variant joined by +, such as prefill-uniform-r1k4l64+decode-workgroup";
        let (prefill, decode) = name.split_once('+').ok_or(NameError { found: name.to_owned(), needed })?;
        Ok(Self { prefill: prefill.parse()?, decode: decode.parse()? })
    }
}

impl fmt::Display for KernelShape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { geometry, q, kv, out } = self;
        let (group, head_dim, v_head_dim) = (geometry.group(), geometry.head_dim(), geometry.v_head_dim());
        write!(f, "group={group} head_dim={head_dim} v_head_dim={v_head_dim} q={q} kv={kv} out={out}")?;
        if geometry.is_latent() { f.write_str(" latent") } else { Ok(()) }
    }
}

impl FromStr for KernelShape {
    type Err = NameError;

    fn from_str(text: &str) -> Result<Self, NameError> {
        let parse = || {
            let mut words = text.split(' ');
            let mut value = |key: &str| words.next()?.strip_prefix(key)?.strip_prefix('=');
            let [group, head_dim, v_head_dim] = [value("group")?, value("head_dim")?, value("v_head_dim")?];
            let (group, head_dim, v_head_dim) = (group.parse().ok()?, head_dim.parse().ok()?, v_head_dim.parse().ok()?);
            let q = value("q")?.parse::<Dtype>().ok()?;
            let kv = value("kv")?.parse::<KvDtypes>().ok()?;
            let out = value("out")?.parse::<Dtype>().ok()?;
            let geometry = match words.next() {
                Some("latent") => HeadGeometry::latent(group, head_dim, v_head_dim),
                _ => HeadGeometry::with_v_head_dim(group, 1, head_dim, v_head_dim),
            };
            Some(Self { geometry: geometry.ok()?, q, kv, out })
        };
        let needed = "a shape such as group=3 head_dim=64 v_head_dim=64 q=f16 kv=f16 out=f32";
        named(text, needed, parse(), |shape| match shape.out {
            Dtype::F32 | Dtype::F16 => Ok(()),
            Dtype::Bf16 => Err("an output type of f32 or f16"),
        })
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use std::collections::HashSet;

    use proptest::prelude::*;

    use super::*;
    use crate::kernels::SUBGROUP_SIZES;

    fn subgroup() -> impl Strategy<Value = u32> {
        proptest::sample::select(&SUBGROUP_SIZES[..])
    }

    pub(crate) fn prefill() -> impl Strategy<Value = PrefillVariant> {
        let sizes = (prop_oneof![Just(0), subgroup()], 1..9_u32, 1..17_u32, 1..17_u32);
        let split = prop_oneof![Just(None), (1..1_u32 << 20).prop_map(Some)];
        (sizes, split, any::<bool>()).prop_filter_map(
            "keys per split",
            |((subgroup, units, rows_per_lane, step_keys), split, alternates)| {
                let split_keys = split.map_or(UNSPLIT, |steps| steps * step_keys);
                let order = if alternates { ItemOrder::Alternating } else { ItemOrder::LargeFirst };
                let lanes = units * subgroup.max(1);
                let variant = PrefillVariant { subgroup, lanes, rows_per_lane, step_keys, split_keys, order };
                variant.check().is_ok().then_some(variant)
            },
        )
    }

    pub(crate) fn decode() -> impl Strategy<Value = DecodeVariant> {
        prop_oneof![
            Just(DecodeVariant::Workgroup),
            subgroup().prop_map(|subgroup| DecodeVariant::Streams { subgroup }),
            subgroup().prop_map(|subgroup| DecodeVariant::Exchange { subgroup }),
        ]
    }

    proptest! {
        #[test]
        fn every_variant_is_read_back_from_its_name(prefill in prefill(), decode in decode()) {
            let variants = Variants { prefill, decode };
            prop_assert_eq!(variants.to_string().parse(), Ok(variants));
            prop_assert_eq!(prefill.to_string().parse(), Ok(prefill));
            prop_assert_eq!(decode.to_string().parse(), Ok(decode));
        }

        /// Whatever is read has the name that it was read from.
        #[test]
        fn no_other_name_is_read(
            prefill in "prefill-(uniform|broadcast[0-9]{1,2})-r[+0-9]{1,2}k[0-9]{1,2}l[0-9]{1,2}(s[0-9]{1,10})?a?",
            decode in "decode-(workgroup|streams|exchange)[+0-9]{0,2}",
        ) {
            if let Ok(variant) = prefill.parse::<PrefillVariant>() {
                prop_assert_eq!(variant.to_string(), prefill);
            }
            if let Ok(variant) = decode.parse::<DecodeVariant>() {
                prop_assert_eq!(variant.to_string(), decode);
            }
        }
    }

    #[test]
    fn variants_of_the_rule_have_names_of_their_own() {
        for dim in [8, 64, 128, 256] {
            let all = Variants::all(&HeadGeometry::new(4, 2, dim).unwrap());
            let distinct: HashSet<_> = all.iter().collect();
            let names: HashSet<_> = all.iter().map(Variants::to_string).collect();
            assert_eq!(distinct.len(), names.len());
            for variants in all {
                assert_eq!(variants.to_string().parse(), Ok(variants));
            }
        }
    }

    #[test]
    fn names_that_are_refused() {
        for (name, needed) in [
            ("", "joined by +"),
            ("prefill-uniform-r1k4l64", "joined by +"),
            ("prefill-uniform-r1k4l64+", "a decode variant"),
            ("decode-workgroup+prefill-uniform-r1k4l64", "a prefill variant"),
            ("prefill-uniform-r1k4l64+decode-workgroup ", "a decode variant"),
            ("prefill-uniform-r01k4l64+decode-workgroup", "a prefill variant"),
            ("prefill-uniform-r1k4l64s2147483648+decode-workgroup", "a prefill variant"),
            ("prefill-broadcast0-r1k4l64+decode-workgroup", "a prefill variant"),
            ("prefill-uniform-r1k4l64as4+decode-workgroup", "a prefill variant"),
            ("prefill-uniform-r99999999999k4l64+decode-workgroup", "a prefill variant"),
            ("prefill-uniform-r0k4l64+decode-workgroup", "rows per lane"),
            ("prefill-uniform-r1k3l64s32768+decode-workgroup", "a power of two"),
            ("prefill-uniform-r1k4l64s32767+decode-workgroup", "keys per split"),
            ("prefill-broadcast8-r1k4l12+decode-workgroup", "lanes"),
            ("prefill-broadcast5-r1k4l10+decode-workgroup", "subgroup size"),
            ("prefill-uniform-r1k4l64+decode-streams0", "subgroup size"),
            ("prefill-uniform-r1k4l64+decode-streams", "a decode variant"),
        ] {
            let error = name.parse::<Variants>().unwrap_err();
            assert!(error.needed.contains(needed), "{name:?}: {error}");
            assert!(error.to_string().contains(&error.found) && name.contains(&error.found), "{name:?}: {error}");
        }
        for (shape, needed) in [
            ("group=3 head_dim=64 v_head_dim=64 q=f16 kv=f16", "a shape"),
            ("group=3  head_dim=64 v_head_dim=64 q=f16 kv=f16 out=f32", "a shape"),
            ("group=3 head_dim=64 v_head_dim=64 q=f16 kv=f16 out=f32 more", "a shape"),
            ("head_dim=64 group=3 v_head_dim=64 q=f16 kv=f16 out=f32", "a shape"),
            ("group=0 head_dim=64 v_head_dim=64 q=f16 kv=f16 out=f32", "a shape"),
            ("group=3 head_dim=577 v_head_dim=64 q=f16 kv=f16 out=f32", "a shape"),
            ("group=3 head_dim=64 v_head_dim=64 q=f8 kv=f16 out=f32", "a shape"),
            ("group=3 head_dim=64 v_head_dim=64 q=f16 kv=f16 out=bf16", "an output type"),
        ] {
            let error = shape.parse::<KernelShape>().unwrap_err();
            assert!(error.needed.contains(needed) && error.found == shape, "{error}");
        }
        for shape in [
            "group=3 head_dim=64 v_head_dim=59 q=bf16 kv=f16 out=f32",
            "group=16 head_dim=576 v_head_dim=512 q=f16 kv=f16 out=f32 latent",
        ] {
            assert_eq!(shape.parse::<KernelShape>().unwrap().to_string(), shape);
        }
    }
}
