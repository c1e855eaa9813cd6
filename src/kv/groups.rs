//! Segments that a dispatch binds at once, where the pool has more than a device has bindings for.

use std::num::NonZeroU32;
use std::ops::Range;

use super::layout::KvLayout;

/// A pool in groups of segments: each group is what one dispatch binds, and each page is of one group.
///
/// All groups bind the same number of segments. Where the segments do not go into them evenly, the last group binds some that
/// the one before it has already, whose pages are not its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct SegmentGroups {
    layout: KvLayout,
    /// Segments that a dispatch binds.
    bound: u32,
}

impl SegmentGroups {
    /// Groups of `bound` segments, or of all where there are fewer.
    pub fn new(layout: &KvLayout, bound: NonZeroU32) -> Self {
        Self { layout: *layout, bound: layout.segments().min(bound).get() }
    }

    /// The pool in one group.
    pub fn whole(layout: &KvLayout) -> Self {
        Self::new(layout, layout.segments())
    }

    pub fn layout(&self) -> &KvLayout {
        &self.layout
    }

    pub fn count(&self) -> u32 {
        self.layout.segments().get().div_ceil(self.bound)
    }

    /// The group of a page.
    pub fn of_page(&self, page: u32) -> u32 {
        page / self.layout.segment_pages().max(1) / self.bound
    }

    /// The pages of a group.
    pub fn pages(&self, group: u32) -> Range<u32> {
        let page_count = self.layout.page_count();
        let begin = |group: u32| {
            let pages = self.bound.saturating_mul(self.layout.segment_pages());
            group.saturating_mul(pages).min(page_count)
        };
        begin(group)..begin(group + 1)
    }

    /// The segments that a group binds.
    pub fn segments(&self, group: u32) -> Range<u32> {
        let begin = group.saturating_mul(self.bound).min(self.layout.segments().get() - self.bound);
        begin..begin + self.bound
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::geometry::{Dtype, HeadGeometry, PageSize};

    /// Every page is of one group, which binds the page's segment.
    #[test]
    fn every_page_is_of_one_group() {
        let geometry = HeadGeometry::new(1, 1, 8).unwrap();
        for (page_count, size) in (0..40).flat_map(|count| (1..12).map(move |size| (count, size))) {
            let layout = KvLayout::new(geometry, Dtype::F32, PageSize::ONE, page_count).unwrap();
            let layout = layout.with_segment_pages(NonZeroU32::new(size).unwrap());
            for bound in 1..9 {
                let groups = SegmentGroups::new(&layout, NonZeroU32::new(bound).unwrap());
                let segments = layout.segments().get();
                assert_eq!(groups.count(), segments.div_ceil(bound.min(segments)));
                let mut next = 0;
                for group in 0..groups.count() {
                    let (pages, bound_segments) = (groups.pages(group), groups.segments(group));
                    assert_eq!(pages.start, next);
                    assert_eq!(bound_segments.len() as u32, bound.min(segments));
                    assert!(bound_segments.end <= segments);
                    for page in pages.clone() {
                        assert_eq!(groups.of_page(page), group);
                        assert!(bound_segments.contains(&(layout.place_of(page).0 as u32)));
                    }
                    next = pages.end;
                }
                assert_eq!(next, page_count);
            }
        }
    }
}
