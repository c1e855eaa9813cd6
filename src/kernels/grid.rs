//! Folding of a linear grid into the three axes of a dispatch.

/// Workgroups along x, y and z that cover `groups` with at most `axis_max` each; `None` if they cannot, or if the kernels
/// could not count them in 32 bits.
///
/// The grid may be larger than `groups`: the kernels count linearly (`linear_group` in the shaders' `lib/grid.wgsl`)
/// and what lies past the end returns at once.
pub(crate) fn fold_grid(groups: u32, axis_max: u32) -> Option<[u32; 3]> {
    let axis_max = axis_max.max(1);
    let x = groups.min(axis_max);
    if x == 0 {
        return Some([0, 0, 0]);
    }
    let y = groups.div_ceil(x).min(axis_max);
    // x * y <= axis_max^2 may pass 32 bits.
    let z = u64::from(groups).div_ceil(u64::from(x) * u64::from(y));
    let counted = u64::from(x) * u64::from(y) * z <= 1 << 32;
    (z <= u64::from(axis_max) && counted).then_some([x, y, z as u32])
}

#[cfg(test)]
mod tests {
    use super::fold_grid;

    #[test]
    fn folds_cover_every_group_and_stay_within_the_axes() {
        for axis_max in [1, 2, 3, 7, 65_535] {
            for groups in (0..600).chain([65_535, 65_536, 70_001, 4_294_836_225, u32::MAX]) {
                let Some([x, y, z]) = fold_grid(groups, axis_max) else {
                    // A second layer of the largest axes would pass 32 bits.
                    let slots = u128::from(axis_max).pow(if axis_max == 65_535 { 2 } else { 3 });
                    assert!(u128::from(groups) > slots, "{groups} over {axis_max}");
                    continue;
                };
                assert!(x.max(y).max(z) <= axis_max);
                let covered = u128::from(x) * u128::from(y) * u128::from(z);
                assert!(covered >= u128::from(groups), "{groups} over {axis_max}: {x} {y} {z}");
                // The kernels count in 32 bits.
                assert!(covered <= 1 << 32, "{groups} over {axis_max}: {x} {y} {z}");
            }
        }
    }
}
