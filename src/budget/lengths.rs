//! Lengths of requests, and the slots that pages or reservations leave unused.

use std::collections::BTreeMap;

use super::BudgetError;
use crate::geometry::PageSize;

/// The mean of `(B - 1) / 2` slots that equation 3 gives where a length leaves every remainder by the page size `B`
/// equally often, as uniform lengths from 1 to a multiple of `B` do.
pub fn expected_tail_slots(page_size: PageSize) -> f64 {
    f64::from(page_size.get() - 1) / 2.0
}

/// A mean, kept exactly: a sum over counted lengths and how many there are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mean {
    total: u64,
    count: u64,
}

impl Mean {
    /// The sum over all lengths.
    pub fn total(self) -> u64 {
        self.total
    }

    /// The number of lengths, at least 1.
    pub fn count(self) -> u64 {
        self.count
    }

    /// Sum over number; exact where the quotient is a float64 and both are below 2^53.
    pub fn value(self) -> f64 {
        self.total as f64 / self.count as f64
    }

    /// The mean of a sum over `requests` lengths, rounded up.
    pub(super) fn of_requests(self, requests: u64) -> Result<u64, BudgetError> {
        // A count is at least 1, and a product of two 64-bit numbers fits into 128.
        let sum = (u128::from(self.total) * u128::from(requests)).div_ceil(self.count.max(1).into());
        u64::try_from(sum).map_err(|_| BudgetError::Overflow { what: "a sum over all requests" })
    }
}

/// A distribution of request lengths in tokens, each at least 1. A length is a request's last one: of its prompt and
/// of all that is generated.
///
/// Sums over it are exact, over the whole support: nothing is sampled.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Lengths {
    kind: Kind,
    count: u64,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Kind {
    /// Every length from the first to the last, once.
    Uniform(u32, u32),
    /// Lengths and how often each occurs.
    Counted(BTreeMap<u32, u64>),
}

/// Lengths that are counted at most; sums over pages and slots then stay within 64 bits.
const COUNT_MAX: u64 = u32::MAX as u64;

impl Lengths {
    /// Every request has `tokens` tokens.
    ///
    /// # Errors
    /// [`BudgetError::Zero`].
    pub fn fixed(tokens: u32) -> Result<Self, BudgetError> {
        Self::uniform(tokens, tokens)
    }

    /// Every length from `first` to `last` is equally likely.
    ///
    /// # Errors
    /// [`BudgetError::Zero`] or [`BudgetError::Range`].
    pub fn uniform(first: u32, last: u32) -> Result<Self, BudgetError> {
        if first == 0 {
            return Err(BudgetError::Zero { name: "the shortest length" });
        }
        let Some(others) = last.checked_sub(first) else {
            return Err(BudgetError::Range { first, last });
        };
        Ok(Self { kind: Kind::Uniform(first, last), count: u64::from(others) + 1 })
    }

    /// Exactly these lengths, each equally likely: of a trace, or of the requests at hand.
    ///
    /// # Errors
    /// [`BudgetError::NoLengths`], [`BudgetError::ZeroLength`] or [`BudgetError::TooManyLengths`].
    pub fn observed(lengths: impl IntoIterator<Item = u32>) -> Result<Self, BudgetError> {
        let mut counted = BTreeMap::new();
        let mut count = 0_u64;
        for (index, tokens) in lengths.into_iter().enumerate() {
            if tokens == 0 {
                return Err(BudgetError::ZeroLength { index });
            }
            count += 1;
            if count > COUNT_MAX {
                return Err(BudgetError::TooManyLengths { found: count, limit: COUNT_MAX });
            }
            *counted.entry(tokens).or_default() += 1;
        }
        if count == 0 {
            return Err(BudgetError::NoLengths);
        }
        Ok(Self { kind: Kind::Counted(counted), count })
    }

    /// The number of lengths, the `N` of equation 2.
    pub fn count(&self) -> u64 {
        self.count
    }

    /// The longest length, in tokens.
    pub fn longest(&self) -> u32 {
        match &self.kind {
            Kind::Uniform(_, last) => *last,
            Kind::Counted(counted) => counted.last_key_value().map_or(0, |(tokens, _)| *tokens),
        }
    }

    /// How many different lengths there are.
    pub fn distinct(&self) -> u64 {
        match &self.kind {
            Kind::Uniform(..) => self.count,
            Kind::Counted(counted) => counted.len() as u64,
        }
    }

    /// Tokens of a request.
    pub fn tokens(&self) -> Mean {
        // Pages of one token.
        self.pages(PageSize::ONE)
    }

    /// Pages of a request, the last one included.
    pub fn pages(&self, page_size: PageSize) -> Mean {
        let total = match &self.kind {
            Kind::Uniform(first, last) => pages_up_to(*last, page_size) - pages_up_to(first - 1, page_size),
            Kind::Counted(counted) => {
                counted.iter().map(|(tokens, times)| u64::from(page_size.pages_for(*tokens)) * times).sum()
            }
        };
        self.mean(total)
    }

    /// Slots that are unused at the end of a request's last page: the left side of equation 2,
    /// `sum(B * ceil(T / B) - T)`, as a mean.
    pub fn tail_slots(&self, page_size: PageSize) -> Mean {
        let slots = u128::from(self.pages(page_size).total) * u128::from(page_size.get());
        // Less than B for each of fewer than 2^32 lengths.
        self.mean((slots - u128::from(self.tokens().total)) as u64)
    }

    /// The right side of equation 2, `N * (B - 1)`, as a mean: what no request's tail passes.
    pub fn tail_slots_bound(&self, page_size: PageSize) -> Mean {
        self.mean(self.count * u64::from(page_size.get() - 1))
    }

    /// Slots that are unused where every request reserves `reserved` tokens: a page of that size each.
    ///
    /// # Errors
    /// [`BudgetError::Reserved`] if that is less than the longest length.
    pub fn reserved_waste(&self, reserved: u32) -> Result<Mean, BudgetError> {
        let needed = self.longest();
        match PageSize::new(reserved) {
            Ok(page) if reserved >= needed => Ok(self.tail_slots(page)),
            _ => Err(BudgetError::Reserved { found: reserved, needed }),
        }
    }

    /// The mean of something that each length has, by going through the different lengths.
    pub(super) fn mean_of(
        &self,
        what: &'static str,
        of: impl Fn(u32) -> Result<u64, BudgetError>,
    ) -> Result<Mean, BudgetError> {
        let mut total = 0_u64;
        let mut add = |tokens: u32, times: u64| {
            let sum = of(tokens)?.checked_mul(times).and_then(|part| total.checked_add(part));
            total = sum.ok_or(BudgetError::Overflow { what })?;
            Ok::<(), BudgetError>(())
        };
        match &self.kind {
            Kind::Uniform(first, last) => (*first..=*last).try_for_each(|tokens| add(tokens, 1))?,
            Kind::Counted(counted) => counted.iter().try_for_each(|(tokens, times)| add(*tokens, *times))?,
        }
        Ok(self.mean(total))
    }

    fn mean(&self, total: u64) -> Mean {
        Mean { total, count: self.count }
    }
}

/// Pages of one request of each length from 1 to `last`: `B` lengths take one page, the next `B` two, and so on.
fn pages_up_to(last: u32, page_size: PageSize) -> u64 {
    let (full, rest) = (u64::from(last / page_size.get()), u64::from(last % page_size.get()));
    // Below 2^64: at most 2^32 - 1 lengths of at most 2^32 - 1 pages. One of two neighbours is even.
    let pairs = full * (full + 1) / 2;
    u64::from(page_size.get()) * pairs + rest * (full + 1)
}
