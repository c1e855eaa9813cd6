//! The types in which keys and values are stored.

use std::fmt;
use std::str::FromStr;

use thiserror::Error;

use crate::geometry::{Dtype, HeadGeometry, padded_dim};

/// How an element of a key or value row is stored in the pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum KvDtype {
    /// IEEE binary32.
    F32,
    /// IEEE binary16.
    F16,
    /// bfloat16.
    Bf16,
    /// A whole number from -127 to 127, times a scale in f32 that each row (token and head) has of its own: the largest
    /// magnitude in the row over 127. Scales lie in the page, after its rows.
    Int8,
    /// An 8-bit float with 4 bits of exponent and 3 of mantissa (e4m3fn: up to 448, no infinity), times a scale in f32 that
    /// the caller gives for each KV head.
    Fp8,
}

/// The largest magnitude of an int8 element, before its scale.
pub const INT8_MAX: f32 = 127.0;

/// The largest magnitude of an fp8 element, before its scale.
pub const FP8_MAX: f32 = 448.0;

/// The smallest scale that a head may have: 2^-100. Its inverse must be in f32.
pub const HEAD_SCALE_MIN: f32 = 1.0 / HEAD_SCALE_MAX;

/// The largest scale that a head may have: 2^100.
pub const HEAD_SCALE_MAX: f32 = 1_267_650_600_228_229_401_496_703_205_376.0;

impl From<Dtype> for KvDtype {
    fn from(dtype: Dtype) -> Self {
        match dtype {
            Dtype::F32 => Self::F32,
            Dtype::F16 => Self::F16,
            Dtype::Bf16 => Self::Bf16,
        }
    }
}

impl KvDtype {
    /// Every type.
    pub const ALL: [Self; 5] = [Self::F32, Self::F16, Self::Bf16, Self::Int8, Self::Fp8];

    /// The type as that of a tensor; `None` where elements have scales.
    pub const fn float(self) -> Option<Dtype> {
        match self {
            Self::F32 => Some(Dtype::F32),
            Self::F16 => Some(Dtype::F16),
            Self::Bf16 => Some(Dtype::Bf16),
            Self::Int8 | Self::Fp8 => None,
        }
    }

    /// Bytes per element.
    pub const fn bytes(self) -> u32 {
        match self.float() {
            Some(dtype) => dtype.bytes(),
            None => 1,
        }
    }

    /// Vectors of 16 bytes that a row of `dim` elements takes.
    pub const fn row_vectors(self, dim: u32) -> u32 {
        (padded_dim(dim) * self.bytes()).div_ceil(16)
    }

    /// Whether each row has a scale of its own.
    pub const fn has_row_scales(self) -> bool {
        matches!(self, Self::Int8)
    }

    /// Whether each KV head has a scale, given by the caller.
    pub const fn has_head_scales(self) -> bool {
        matches!(self, Self::Fp8)
    }
}

impl fmt::Display for KvDtype {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::F32 => "f32",
            Self::F16 => "f16",
            Self::Bf16 => "bf16",
            Self::Int8 => "int8",
            Self::Fp8 => "fp8",
        })
    }
}

/// The types of keys and of values, which may differ. Where values are part of the keys, theirs is the keys'.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct KvDtypes {
    /// Of the keys.
    pub k: KvDtype,
    /// Of the values.
    pub v: KvDtype,
}

impl KvDtypes {
    /// The types with which heads are stored: values that are part of the keys have the keys' type.
    pub(crate) fn of(self, geometry: &HeadGeometry) -> Self {
        if geometry.is_latent() { Self { v: self.k, ..self } } else { self }
    }

    /// The type of both, where it is that of a tensor.
    pub fn float(self) -> Option<Dtype> {
        self.k.float().filter(|_| self.k == self.v)
    }

    /// Whether rows of `dtype` can be stored as they are.
    pub(crate) fn hold(self, dtype: Dtype) -> bool {
        self == Self::from(dtype)
    }

    /// Whether keys or values have scales.
    pub fn has_scales(self) -> bool {
        self.has_row_scales() || self.has_head_scales()
    }

    /// Whether keys or values have scales that the caller gives.
    pub fn has_head_scales(self) -> bool {
        self.k.has_head_scales() || self.v.has_head_scales()
    }

    /// Whether rows of keys or of values have scales of their own.
    pub fn has_row_scales(self) -> bool {
        self.k.has_row_scales() || self.v.has_row_scales()
    }
}

impl From<KvDtype> for KvDtypes {
    fn from(dtype: KvDtype) -> Self {
        Self { k: dtype, v: dtype }
    }
}

impl From<Dtype> for KvDtypes {
    fn from(dtype: Dtype) -> Self {
        KvDtype::from(dtype).into()
    }
}

impl fmt::Display for KvDtypes {
    /// `f16`, or keys and values where they differ: `int8/f16`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { k, v } = self;
        if k == v { write!(f, "{k}") } else { write!(f, "{k}/{v}") }
    }
}

/// A text that names no type of keys and values.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error("found {found:?}; f32, f16, bf16, int8 or fp8 is needed, or two of them joined by /")]
pub struct KvDtypeError {
    /// The text found.
    pub found: String,
}

impl FromStr for KvDtype {
    type Err = KvDtypeError;

    fn from_str(name: &str) -> Result<Self, KvDtypeError> {
        let found = Self::ALL.into_iter().find(|dtype| dtype.to_string() == name);
        found.ok_or_else(|| KvDtypeError { found: name.to_owned() })
    }
}

impl FromStr for KvDtypes {
    type Err = KvDtypeError;

    fn from_str(name: &str) -> Result<Self, KvDtypeError> {
        match name.split_once('/') {
            Some((_, v)) if v.contains('/') => Err(KvDtypeError { found: name.to_owned() }),
            Some((k, v)) => Ok(Self { k: k.parse()?, v: v.parse()? }),
            None => Ok(name.parse::<KvDtype>()?.into()),
        }
    }
}
