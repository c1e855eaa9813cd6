//! `--shuffle-pages`: where the pages of a contiguous case go.

use paged_attention::{Case, PageSize};

/// Random places for a case's pages, one per page needed, in a pool of about twice the need.
///
/// The generator is written out here (SplitMix64, <https://prng.di.unimi.it/splitmix64.c>) so that the seed in a
/// bug report gives the same pages in every version.
pub fn shuffled(case: &Case, page_size: PageSize, seed: u64) -> Vec<u32> {
    let needed: u32 = case.lengths().iter().map(|(_, kv_len)| page_size.pages_for(*kv_len)).sum();
    let pool = needed.saturating_mul(2).saturating_add(1);
    let mut state = seed;
    let mut ids: Vec<u32> = (0..pool).collect();
    // The first steps of a Fisher-Yates shuffle. The bias of `%` is below 2^-32 per draw.
    for place in 0..needed {
        let other = place + (splitmix64(&mut state) % u64::from(pool - place)) as u32;
        ids.swap(place as usize, other as usize);
    }
    ids.truncate(needed as usize);
    ids
}

/// The next number of a reproducible sequence.
fn splitmix64(state: &mut u64) -> u64 {
    *state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let mut z = *state;
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

#[cfg(test)]
mod tests {
    use paged_attention::{AttentionOptions, Dtype, HeadGeometry, KvSource, Tensor};

    use super::*;

    #[test]
    fn distinct_scattered_and_reproducible() {
        let geometry = HeadGeometry::new(1, 1, 1).unwrap();
        let tensor = |rows: usize| Tensor::from_f32(Dtype::F32, &[rows, 1, 1], &vec![0.0; rows]).unwrap();
        let kv = KvSource::Contiguous { k: tensor(100), v: tensor(100), kv_indptr: vec![0, 33, 33, 100] };
        let case = Case::new(geometry, AttentionOptions::new(&geometry), tensor(0), vec![0, 0, 0, 0], kv).unwrap();
        let page_size = PageSize::new(8).unwrap();
        let ids = shuffled(&case, page_size, 7);
        assert_eq!(ids.len(), 5 + 9);
        assert_eq!(ids, shuffled(&case, page_size, 7));
        assert_ne!(ids, shuffled(&case, page_size, 8));
        let mut sorted = ids.clone();
        sorted.sort_unstable();
        assert_ne!(ids, sorted);
        sorted.dedup();
        assert_eq!(sorted.len(), ids.len());
        assert!(sorted.iter().all(|id| *id < 29));
    }

    #[test]
    fn generator_is_the_published_one() {
        let mut state = 1_234_567;
        let first: Vec<u64> = (0..3).map(|_| splitmix64(&mut state)).collect();
        assert_eq!(first, [6_457_827_717_110_365_317, 3_203_168_211_198_807_973, 9_817_491_932_198_370_423]);
    }
}
