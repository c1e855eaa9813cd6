//! What pages hold, read on the host.

use super::dtypes::{KvDtype, KvDtypes};
use super::layout::{KvLayout, RowLayout, VECTOR_BYTES};
use crate::tensor::Tensor;

/// The bytes of a pool, as read back from a device or as a caller's own.
#[derive(Clone, Copy, Debug)]
pub struct PoolView<'a> {
    layout: &'a KvLayout,
    bytes: &'a [u8],
    head_scales: &'a [[f32; 2]],
}

impl<'a> PoolView<'a> {
    /// A pool of that layout. `head_scales` are the scales of keys and values of each KV head, `[kv_heads]`, where either
    /// is fp8; else they are not looked at.
    pub fn new(layout: &'a KvLayout, bytes: &'a [u8], head_scales: &'a [[f32; 2]]) -> Self {
        Self { layout, bytes, head_scales }
    }

    /// The key in a slot, `[head_dim]`, times its scale if it has one; `None` for a place that the bytes do not have.
    pub fn key(&self, page: u32, kv_head: u32, slot: u32) -> Option<Vec<f32>> {
        let (layout, KvDtypes { k, .. }) = (self.layout, self.layout.dtypes());
        let dim = layout.geometry().head_dim();
        self.row((k, dim), layout.k_rows(), layout.k_scales(), 0, [page, kv_head, slot])
    }

    /// The value in a slot, `[v_head_dim]`, alike.
    pub fn value(&self, page: u32, kv_head: u32, slot: u32) -> Option<Vec<f32>> {
        let (layout, KvDtypes { v, .. }) = (self.layout, self.layout.dtypes());
        let dim = layout.geometry().v_head_dim();
        let head_scale = if layout.geometry().is_latent() { 0 } else { 1 };
        self.row((v, dim), layout.v_rows(), layout.v_scales(), head_scale, [page, kv_head, slot])
    }

    fn row(
        &self,
        (dtype, dim): (KvDtype, u32),
        rows: &RowLayout,
        scales: Option<&RowLayout>,
        head_scale: usize,
        [page, kv_head, slot]: [u32; 3],
    ) -> Option<Vec<f32>> {
        let geometry = self.layout.geometry();
        let (pages, slots) = (self.layout.page_count(), self.layout.page_size().get());
        if page >= pages || kv_head >= geometry.kv_heads() || slot >= slots {
            return None;
        }
        let (dim, start) = (dim as usize, u64::from(rows.offset(page, kv_head, slot)) * u64::from(VECTOR_BYTES));
        let bytes = self.part(start, dim * dtype.bytes() as usize)?;
        let scale = match scales {
            Some(scales) => {
                let word = self.part(4 * u64::from(scales.offset(page, kv_head, slot)), 4)?;
                Some(f32::from_le_bytes(word.try_into().ok()?))
            }
            None if dtype.has_head_scales() => Some(*self.head_scales.get(kv_head as usize)?.get(head_scale)?),
            None => None,
        };
        match (dtype, scale) {
            (KvDtype::Int8, Some(scale)) => {
                Some(bytes.iter().map(|byte| f32::from(i8::from_le_bytes([*byte])) * scale).collect())
            }
            (KvDtype::Fp8, Some(scale)) => Some(bytes.iter().map(|byte| fp8_to_f32(*byte) * scale).collect()),
            (dtype, _) => {
                let tensor = Tensor::from_bytes(dtype.float()?, &[dim], bytes.to_vec()).ok()?;
                Some(tensor.to_f32())
            }
        }
    }

    fn part(&self, start: u64, len: usize) -> Option<&'a [u8]> {
        let start = usize::try_from(start).ok()?;
        self.bytes.get(start..start.checked_add(len)?)
    }
}

/// The value of an fp8 element (e4m3fn) without its scale; NaN for the two codes that stand for it.
pub fn fp8_to_f32(byte: u8) -> f32 {
    let (exponent, mantissa) = (i32::from(byte >> 3 & 0xf), f32::from(byte & 7));
    let magnitude = match exponent {
        15 if byte & 7 == 7 => f32::NAN,
        0 => mantissa * 2_f32.powi(-9),
        _ => (1.0 + mantissa / 8.0) * 2_f32.powi(exponent - 7),
    };
    if byte & 0x80 != 0 { -magnitude } else { magnitude }
}

#[cfg(test)]
mod tests {
    use half::f16;

    use super::*;
    use crate::geometry::{Dtype, HeadGeometry, PageSize};
    use crate::kv::RowOrder;

    /// An fp8 number is an f16 number with another exponent's bias and fewer bits of mantissa.
    #[test]
    fn every_fp8_code() {
        for byte in 0..=u8::MAX {
            let (sign, magnitude) = (u16::from(byte >> 7) << 15, u16::from(byte & 0x7f) << 7);
            let expected = f16::from_bits(sign | magnitude).to_f32() * 256.0;
            let found = fp8_to_f32(byte);
            if byte & 0x7f == 0x7f {
                assert!(found.is_nan());
            } else {
                assert_eq!(found.to_bits(), expected.to_bits(), "{byte:#x}");
            }
        }
    }

    #[test]
    fn rows_are_read_where_they_lie() {
        let geometry = HeadGeometry::with_v_head_dim(2, 2, 3, 2).unwrap();
        let dtypes = KvDtypes { k: KvDtype::Int8, v: KvDtype::Fp8 };
        let layout =
            KvLayout::new(geometry, dtypes, PageSize::new(2).unwrap(), 3).unwrap().with_order(RowOrder::SlotHead);
        let mut bytes = vec![0xff; layout.bytes() as usize];
        let (page, head, slot) = (2, 1, 0);
        let at = layout.k_rows().offset(page, head, slot) as usize * 16;
        bytes[at..at + 3].copy_from_slice(&[127, 0x81, 1]);
        let at = layout.k_scales().unwrap().offset(page, head, slot) as usize * 4;
        bytes[at..at + 4].copy_from_slice(&0.5_f32.to_le_bytes());
        let at = layout.v_rows().offset(page, head, slot) as usize * 16;
        bytes[at..at + 2].copy_from_slice(&[0x38, 0xfe]);
        let view = PoolView::new(&layout, &bytes, &[[9.0, 9.0], [3.0, 2.0]]);
        assert_eq!(view.key(page, head, slot), Some(vec![63.5, -63.5, 0.5]));
        assert_eq!(view.value(page, head, slot), Some(vec![2.0, -896.0]));
        for [page, head, slot] in [[3, 0, 0], [0, 2, 0], [0, 0, 2]] {
            assert_eq!((view.key(page, head, slot), view.value(page, head, slot)), (None, None));
        }
        let short = PoolView::new(&layout, &bytes[..layout.bytes() as usize - 100], &[]);
        assert_eq!((short.key(2, 1, 1), short.value(0, 0, 0)), (None, None));
    }

    #[test]
    fn values_that_are_part_of_the_keys() {
        let geometry = HeadGeometry::latent(4, 4, 2).unwrap();
        for dtype in [KvDtype::Int8, KvDtype::Fp8, Dtype::F32.into()] {
            let layout = KvLayout::new(geometry, dtype, PageSize::new(1).unwrap(), 1).unwrap();
            let bytes: Vec<u8> = (0..layout.bytes() as u8).collect();
            let view = PoolView::new(&layout, &bytes, &[[0.5, 7.0]]);
            let (key, value) = (view.key(0, 0, 0).unwrap(), view.value(0, 0, 0).unwrap());
            assert_eq!(key[..2], value, "{dtype}");
        }
    }
}
