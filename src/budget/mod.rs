//! How much memory paged keys and values take, and how many requests fit beside everything else: in pure host code, by
//! exact counting.
//!
//! - [`KvShape`], equation 1: bytes per token, `2 * layers * kv_heads * head_dim * element_bytes`, and of many tokens.
//! - [`Lengths`], equations 2 and 3: the slots that stay unused at the end of last pages, their bound, their mean; and
//!   what is unused where each request reserves the maximum instead.
//! - [`MemoryModel`]: all parts of a device's memory, in steady decode and at the peak of a prefill, and how many
//!   requests of given lengths it holds. Sizes of buffers come from the code that makes or checks them.
//!
//! ```
//! use paged_attention::{PageSize, budget::{KvShape, Lengths}};
//!
//! let shape = KvShape::new(32, 8, 128, 2)?;
//! assert_eq!(shape.bytes_per_token(), 131_072);
//! assert_eq!(shape.total_bytes(4096)?, 1 << 29);
//!
//! let (lengths, page_size) = (Lengths::uniform(1, 512)?, PageSize::new(16)?);
//! assert_eq!(lengths.tail_slots(page_size).value(), 7.5);
//! assert_eq!(lengths.reserved_waste(512)?.value(), 255.5);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod lengths;
mod memory;

use thiserror::Error;

use crate::kv::{AppendError, LayoutError};
use crate::plan::PlanError;

pub use lengths::{Lengths, Mean, expected_tail_slots};
pub use memory::{Budget, DISTINCT_LENGTHS_MAX, MemoryConfig, MemoryModel, Parts};

/// A budget that cannot be computed.
#[derive(Clone, Debug, PartialEq, Error)]
#[non_exhaustive]
pub enum BudgetError {
    /// A number that must be at least 1.
    #[error("{name} is 0; at least 1 is needed")]
    Zero {
        /// Which number.
        name: &'static str,
    },
    /// A size or a sum does not fit into 64 bits.
    #[error("{what} passes {}, the most that is counted", u64::MAX)]
    Overflow {
        /// Which size.
        what: &'static str,
    },
    /// There are no lengths to take a mean of.
    #[error("there are 0 lengths; at least 1 is needed")]
    NoLengths,
    /// A length is zero.
    #[error("length {index} is 0; at least 1 token is needed")]
    ZeroLength {
        /// Position of the length, from 0.
        index: usize,
    },
    /// More lengths than are counted.
    #[error("there are {found} lengths; at most {limit} are counted")]
    TooManyLengths {
        /// Lengths found; one past the limit where counting ended there.
        found: u64,
        /// The largest number.
        limit: u64,
    },
    /// A range of lengths that ends before it begins.
    #[error("lengths from {first} to {last}; the last must not be less than the first")]
    Range {
        /// The first length.
        first: u32,
        /// The last length.
        last: u32,
    },
    /// Less is reserved than the longest request needs.
    #[error("{found} tokens are reserved for each request; the longest needs {needed}")]
    Reserved {
        /// Tokens reserved.
        found: u32,
        /// Tokens of the longest request.
        needed: u32,
    },
    /// Pages that cannot be addressed.
    #[error(transparent)]
    Layout(#[from] LayoutError),
    /// A step that one call cannot take.
    #[error(transparent)]
    Plan(#[from] PlanError),
    /// An append that one call cannot take.
    #[error(transparent)]
    Append(#[from] AppendError),
}

/// Keys and values of all layers, as equation 1 counts them: without padding.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KvShape {
    bytes_per_token: u64,
}

impl KvShape {
    /// `kv_heads` heads of `head_dim` elements of `element_bytes` bytes, for keys and for values, in each of `layers`
    /// layers.
    ///
    /// # Errors
    /// [`BudgetError::Zero`]; [`BudgetError::Overflow`] if a token's bytes pass 64 bits.
    pub fn new(layers: u32, kv_heads: u32, head_dim: u32, element_bytes: u32) -> Result<Self, BudgetError> {
        let mut bytes_per_token = 2_u64;
        for (name, factor) in
            [("layers", layers), ("kv_heads", kv_heads), ("head_dim", head_dim), ("element_bytes", element_bytes)]
        {
            if factor == 0 {
                return Err(BudgetError::Zero { name });
            }
            bytes_per_token = product("the size of a token in bytes", bytes_per_token, factor.into())?;
        }
        Ok(Self { bytes_per_token })
    }

    /// Bytes of one token.
    pub fn bytes_per_token(&self) -> u64 {
        self.bytes_per_token
    }

    /// Bytes of `tokens` tokens: the sum of the lengths of all requests.
    ///
    /// # Errors
    /// [`BudgetError::Overflow`] past 64 bits.
    pub fn total_bytes(&self, tokens: u64) -> Result<u64, BudgetError> {
        product("the size of all tokens in bytes", self.bytes_per_token, tokens)
    }
}

fn product(what: &'static str, a: u64, b: u64) -> Result<u64, BudgetError> {
    a.checked_mul(b).ok_or(BudgetError::Overflow { what })
}

#[cfg(test)]
mod tests;
