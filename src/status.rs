//! What a run reports about itself: completed workgroups and error bits.

use thiserror::Error;

/// Bytes of the status words: completed workgroups, error bits.
pub const STATUS_BYTES: u64 = 8;

/// Words before the partial states in a workspace: the status words, and room up to the largest offset alignment.
pub(crate) const STATUS_WORDS: u32 = 64;

/// Set by a kernel that met a page id outside the pool. The host checks the ids before; this is the second line.
const ERROR_PAGE_ID: u32 = 1;

/// Set by a kernel whose loop over keys or splits was ended early by the driver: older llvmpipe ends every loop once an
/// invocation has gone through 65,535 iterations.
const ERROR_CUT_SHORT: u32 = 2;

/// Set by a kernel whose subgroups have another size than it was built for.
const ERROR_SUBGROUP: u32 = 4;

/// Set by a kernel that finds no work where work was recorded: the plan's write never reached the device.
const ERROR_UNWRITTEN: u32 = 8;

/// A run whose result must not be used.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum StatusError {
    /// Fewer (or more) workgroups came to their end than were dispatched: a launch was dropped or cut short, or
    /// commands were recorded that were not counted.
    #[error(
        "{found} workgroups came to their end; {needed} were dispatched, as far as they were counted (of all calls, appends and \
         copies since the workspace was made, or since the earlier status)"
    )]
    Incomplete {
        /// Workgroups counted by the kernels.
        found: u32,
        /// Workgroups dispatched.
        needed: u32,
    },
    /// A kernel met a page id outside the pool.
    #[error("a kernel met a page id outside the pool (error bits {bits:#x})")]
    PageId {
        /// All error bits.
        bits: u32,
    },
    /// The driver ended a loop before its end: the kernel is too long for it.
    #[error("the driver ended a kernel's loop early (error bits {bits:#x})")]
    CutShort {
        /// All error bits.
        bits: u32,
    },
    /// The plan on the device is not the one that a call was recorded with: the encoder of its [`crate::DevicePlan::write`] or
    /// [`crate::Append::write`] was given up, or was not submitted in its turn. The call computed nothing.
    #[error("a call was recorded with a plan that was not on the device when it ran (error bits {bits:#x})")]
    Unwritten {
        /// All error bits.
        bits: u32,
    },
    /// A kernel's subgroups have another size than it was built for.
    #[error("a kernel was built for subgroups of another size than it ran with (error bits {bits:#x})")]
    Subgroup {
        /// All error bits.
        bits: u32,
    },
}

/// The words of a status buffer, as read back.
///
/// They accumulate over all calls that were encoded with the same buffer since it was created; the count wraps.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Status {
    /// Workgroups that came to their end.
    pub completed: u32,
    /// Error bits.
    pub errors: u32,
}

impl Status {
    /// The words in the order in which they lie in the buffer.
    pub fn from_words([completed, errors]: [u32; 2]) -> Self {
        Self { completed, errors }
    }

    /// From the bytes of the words; those that are missing count as 0.
    pub(crate) fn from_bytes(bytes: &[u8]) -> Self {
        let mut words = bytes.chunks_exact(4).filter_map(|word| word.try_into().ok()).map(u32::from_le_bytes);
        let mut word = || words.next().unwrap_or(0);
        Self::from_words([word(), word()])
    }

    /// Whether all went well, for `dispatched` workgroups in all (the sum of [`crate::Call::workgroups`],
    /// [`crate::AppendCall::workgroups`] and [`crate::PageCopies::workgroups`] over all that was submitted since the
    /// workspace was made, wrapping).
    ///
    /// # Errors
    /// [`StatusError`].
    pub fn check(self, dispatched: u32) -> Result<(), StatusError> {
        self.check_since(Self::default(), dispatched)
    }

    /// Whether all has gone well since `before` was read, for `dispatched` workgroups since then. Nothing that went wrong
    /// earlier counts, nor what was recorded and never submitted.
    ///
    /// # Errors
    /// [`StatusError`], of what happened since then. A bit that was set before says nothing more.
    pub fn check_since(self, before: Self, dispatched: u32) -> Result<(), StatusError> {
        let (bits, found) = (self.errors & !before.errors, self.completed.wrapping_sub(before.completed));
        if bits & ERROR_PAGE_ID != 0 {
            return Err(StatusError::PageId { bits });
        }
        if bits & ERROR_SUBGROUP != 0 {
            return Err(StatusError::Subgroup { bits });
        }
        if bits & ERROR_CUT_SHORT != 0 {
            return Err(StatusError::CutShort { bits });
        }
        if bits & ERROR_UNWRITTEN != 0 {
            return Err(StatusError::Unwritten { bits });
        }
        if found != dispatched {
            return Err(StatusError::Incomplete { found, needed: dispatched });
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::{ERROR_CUT_SHORT, ERROR_PAGE_ID, Status, StatusError};

    #[test]
    fn what_went_wrong_before_does_not_count() {
        let before = Status { completed: u32::MAX, errors: ERROR_PAGE_ID };
        let after = Status { completed: 2, errors: ERROR_PAGE_ID };
        assert_eq!(after.check_since(before, 3), Ok(()));
        assert_eq!(after.check_since(before, 2), Err(StatusError::Incomplete { found: 3, needed: 2 }));
        let failed = Status { errors: ERROR_PAGE_ID | ERROR_CUT_SHORT, ..after };
        assert_eq!(failed.check_since(before, 3), Err(StatusError::CutShort { bits: ERROR_CUT_SHORT }));
        assert_eq!(failed.check(2), Err(StatusError::PageId { bits: ERROR_PAGE_ID | ERROR_CUT_SHORT }));
    }
}
