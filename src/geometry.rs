//! Head geometry, page size, storage types: validated once, then passed on.

use std::fmt;
use std::num::NonZeroU32;
use std::str::FromStr;

use thiserror::Error;

/// The largest dimension of queries and keys that the kernels are made for: that of multi-head latent attention, whose
/// values are the first 512 of 576 key dimensions.
pub const HEAD_DIM_MAX: u32 = 576;

/// The largest dimension of values.
pub const V_HEAD_DIM_MAX: u32 = 512;

/// Rows of a device tensor start at multiples of this many elements.
///
/// Two rows then never share a 32-bit word (16-bit stores would race) and every row can be read as
/// vectors of 16 bytes. The elements between a row's end and the next row's start are unowned: they may
/// hold anything and are never used.
pub const ROW_ALIGN: u32 = 8;

/// `dim` rounded up to a multiple of [`ROW_ALIGN`]: the elements a row takes on the device.
pub const fn padded_dim(dim: u32) -> u32 {
    dim.div_ceil(ROW_ALIGN) * ROW_ALIGN
}

/// A configuration that no kernel is made for.
#[derive(Clone, Debug, PartialEq, Error)]
#[non_exhaustive]
pub enum GeometryError {
    /// A head count is zero.
    #[error("{name} is 0; at least 1 is needed")]
    ZeroHeads {
        /// `q_heads` or `kv_heads`.
        name: &'static str,
    },
    /// Query heads cannot be shared out evenly over the KV heads.
    #[error("q_heads {q_heads} is not a multiple of kv_heads {kv_heads}")]
    HeadRatio {
        /// Query heads found.
        q_heads: u32,
        /// KV heads found.
        kv_heads: u32,
    },
    /// A head dimension is outside the supported range.
    #[error("{name} is {found}; 1 to {limit} are supported")]
    HeadDim {
        /// `head_dim` or `v_head_dim`.
        name: &'static str,
        /// The dimension found.
        found: u32,
        /// The largest supported.
        limit: u32,
    },
    /// A page holds no token.
    #[error("page_size is 0; a page holds at least 1 token")]
    ZeroPageSize,
    /// A name that no storage type has.
    #[error("type {found:?} is unknown; f32, f16 or bf16 is needed")]
    Dtype {
        /// The name found.
        found: String,
    },
    /// The softmax scale is not a finite number.
    #[error("scale is {found}; a finite number is needed")]
    Scale {
        /// The scale found.
        found: f64,
    },
}

/// Heads and their dimensions.
///
/// Query head `h` reads KV head `h / (q_heads / kv_heads)`: multi-head attention where the counts are
/// equal, multi-query where `kv_heads` is 1, grouped-query between the two.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct HeadGeometry {
    q_heads: u32,
    kv_heads: u32,
    head_dim: u32,
    v_head_dim: u32,
    latent: bool,
}

impl HeadGeometry {
    /// Heads whose values have as many dimensions as their keys.
    ///
    /// # Errors
    /// As [`HeadGeometry::with_v_head_dim`].
    pub fn new(q_heads: u32, kv_heads: u32, head_dim: u32) -> Result<Self, GeometryError> {
        Self::with_v_head_dim(q_heads, kv_heads, head_dim, head_dim)
    }

    /// Heads whose values may have another dimension than their queries and keys.
    ///
    /// # Errors
    /// [`GeometryError::ZeroHeads`], [`GeometryError::HeadRatio`] or [`GeometryError::HeadDim`].
    pub fn with_v_head_dim(q_heads: u32, kv_heads: u32, head_dim: u32, v_head_dim: u32) -> Result<Self, GeometryError> {
        for (name, count) in [("q_heads", q_heads), ("kv_heads", kv_heads)] {
            if count == 0 {
                return Err(GeometryError::ZeroHeads { name });
            }
        }
        if !q_heads.is_multiple_of(kv_heads) {
            return Err(GeometryError::HeadRatio { q_heads, kv_heads });
        }
        for (name, found, limit) in [("head_dim", head_dim, HEAD_DIM_MAX), ("v_head_dim", v_head_dim, V_HEAD_DIM_MAX)] {
            if found == 0 || found > limit {
                return Err(GeometryError::HeadDim { name, found, limit });
            }
        }
        Ok(Self { q_heads, kv_heads, head_dim, v_head_dim, latent: false })
    }

    /// Multi-head latent attention (DeepSeek-V2): one KV head, whose values are the first `v_head_dim` elements of its keys.
    /// Pages hold each row once, and a kernel that can reads it once.
    ///
    /// # Errors
    /// As [`HeadGeometry::with_v_head_dim`]; [`GeometryError::HeadDim`] if values would be longer than keys.
    pub fn latent(q_heads: u32, head_dim: u32, v_head_dim: u32) -> Result<Self, GeometryError> {
        let geometry = Self::with_v_head_dim(q_heads, 1, head_dim, v_head_dim)?;
        if v_head_dim > head_dim {
            return Err(GeometryError::HeadDim { name: "v_head_dim", found: v_head_dim, limit: head_dim });
        }
        Ok(Self { latent: true, ..geometry })
    }

    /// Whether values are the first elements of the keys.
    pub fn is_latent(&self) -> bool {
        self.latent
    }

    /// Query heads.
    pub fn q_heads(&self) -> u32 {
        self.q_heads
    }

    /// Key and value heads.
    pub fn kv_heads(&self) -> u32 {
        self.kv_heads
    }

    /// Elements of a query or key row.
    pub fn head_dim(&self) -> u32 {
        self.head_dim
    }

    /// Elements of a value or output row.
    pub fn v_head_dim(&self) -> u32 {
        self.v_head_dim
    }

    /// Query heads that share one KV head.
    pub fn group(&self) -> u32 {
        self.q_heads / self.kv_heads
    }

    /// One KV head and the query heads that share it.
    pub(crate) fn of_one_kv_head(&self) -> Self {
        Self { q_heads: self.group(), kv_heads: 1, ..*self }
    }

    /// The customary softmax scale, `1/sqrt(head_dim)`.
    pub fn default_scale(&self) -> f64 {
        1.0 / f64::from(self.head_dim).sqrt()
    }
}

/// Tokens per page, at least 1.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct PageSize(NonZeroU32);

impl PageSize {
    /// Pages of one token.
    pub(crate) const ONE: Self = Self(NonZeroU32::MIN);

    /// # Errors
    /// [`GeometryError::ZeroPageSize`].
    pub fn new(tokens: u32) -> Result<Self, GeometryError> {
        NonZeroU32::new(tokens).map(Self).ok_or(GeometryError::ZeroPageSize)
    }

    /// Tokens per page.
    pub fn get(self) -> u32 {
        self.0.get()
    }

    /// Pages that hold `tokens` tokens.
    pub fn pages_for(self, tokens: u32) -> u32 {
        tokens.div_ceil(self.get())
    }
}

/// How an element is stored. Arithmetic is in f32 whatever the storage.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Dtype {
    /// IEEE binary32.
    F32,
    /// IEEE binary16.
    F16,
    /// bfloat16: the upper half of a binary32.
    Bf16,
}

impl Dtype {
    /// Bytes per element.
    pub const fn bytes(self) -> u32 {
        match self {
            Self::F32 => 4,
            Self::F16 | Self::Bf16 => 2,
        }
    }

    /// 32-bit words that a row of `dim` elements takes on the device, padding included.
    pub const fn row_words(self, dim: u32) -> u32 {
        padded_dim(dim) * self.bytes() / 4
    }
}

impl fmt::Display for Dtype {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::F32 => "f32",
            Self::F16 => "f16",
            Self::Bf16 => "bf16",
        })
    }
}

impl FromStr for Dtype {
    type Err = GeometryError;

    fn from_str(name: &str) -> Result<Self, GeometryError> {
        let found = [Self::F32, Self::F16, Self::Bf16].into_iter().find(|dtype| dtype.to_string() == name);
        found.ok_or_else(|| GeometryError::Dtype { found: name.to_owned() })
    }
}
