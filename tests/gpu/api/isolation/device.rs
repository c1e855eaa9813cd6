//! What goes to the device, and what comes back from it.

use super::*;

impl Server<'_> {
    pub fn record_copies(&mut self, encoder: &mut wgpu::CommandEncoder, copies: &[PageCopy]) -> Result<(), Noticed> {
        let mut copies = copies.to_vec();
        match self.fault {
            Some(Fault::CopyLeftOut) => copies.retain(|copy| !matches!(copy, PageCopy::OnDevice { .. })),
            Some(Fault::SwapInLeftOut) => copies.retain(|copy| !matches!(copy, PageCopy::ToDevice { .. })),
            Some(Fault::CopiesReordered) => copies.sort_by_key(|copy| matches!(copy, PageCopy::ToHost { .. })),
            Some(Fault::SlotsExchanged) => {
                let mut slots: Vec<&mut u32> = copies
                    .iter_mut()
                    .filter_map(|copy| if let PageCopy::ToDevice { slot, .. } = copy { Some(slot) } else { None })
                    .collect();
                let last = slots.len().saturating_sub(1);
                if let Ok([a, b]) = slots.get_disjoint_mut([0, last]) {
                    std::mem::swap(*a, *b);
                }
            }
            _ => {}
        }
        let copied = |copy: &&PageCopy| matches!(copy, PageCopy::OnDevice { .. });
        self.counts.copies_on_write += copies.iter().filter(copied).count();
        let copies = self.store.copies(&self.host.device, &copies, &self.workspace).map_err(refused)?;
        self.dispatched = self.dispatched.wrapping_add(copies.workgroups());
        self.to_host.extend(copies.encode(encoder));
        Ok(())
    }

    pub fn tensor(&self, rows: &[f32]) -> wgpu::Buffer {
        let tensor = Tensor::from_f32(Dtype::F16, &[rows.len()], rows).unwrap();
        // An empty binding is not allowed.
        self.host.buffer(if rows.is_empty() { &[0; 16] } else { tensor.bytes() })
    }

    pub fn empty(&self, size: u64) -> wgpu::Buffer {
        let usage = wgpu::BufferUsages::STORAGE | wgpu::BufferUsages::COPY_SRC | wgpu::BufferUsages::COPY_DST;
        let label = Some("results");
        self.host.device.create_buffer(&wgpu::BufferDescriptor { label, size, usage, mapped_at_creation: false })
    }

    /// Appends and attention of all layers.
    pub fn record_layers(
        &mut self,
        encoder: &mut wgpu::CommandEncoder,
        parts: &[Part],
    ) -> Result<(Vec<Chains>, Vec<[wgpu::Buffer; 2]>), Noticed> {
        let device = &self.host.device;
        let growing = || parts.iter().filter(|part| part.new > 0);
        let rows = Rows::new(growing().map(|part| (part, part.new)));
        let append = AppendPlan::new(self.store.layout(), &rows.batch()).map_err(refused)?;
        let append = Append::upload(device, &append).map_err(refused)?;
        let rows = Rows::new(parts.iter().map(|part| (part, part.q_len)));
        let plan = self.attention.plan(&rows.batch()).map_err(refused)?;
        let chains = plan.chains().to_vec();
        let bytes = self.attention.config().buffer_bytes(rows.batch().total_q());
        let plan = DevicePlan::upload(device, &plan).map_err(refused)?;
        let mut results = Vec::new();
        let mut pass = encoder.begin_compute_pass(&wgpu::ComputePassDescriptor::default());
        for layer in 0..LAYERS {
            let new = |kind| growing().flat_map(|part| part.last(part.new, layer, kind)).collect::<Vec<f32>>();
            let [k, v] = [Kind::K, Kind::V].map(|kind| self.tensor(&new(kind)));
            let q: Vec<f32> = parts.iter().flat_map(|part| part.last(part.q_len, layer, Kind::Q)).collect();
            let q = self.tensor(&q);
            let [out, lse] = [bytes.out, bytes.lse].map(|size| self.empty(size));
            let kv = self.store.pages(layer).map_err(refused)?;
            let (k, v) = (k.as_entire_buffer_binding(), v.as_entire_buffer_binding());
            let source = AppendSource { k, v, kv: kv.clone(), head_scales: None };
            let append = append.bind(device, self.attention.kernels(), source, &self.workspace).map_err(refused)?;
            let io = AttentionIo {
                q: q.as_entire_buffer_binding(),
                kv,
                out: out.as_entire_buffer_binding(),
                lse: lse.as_entire_buffer_binding(),
                heads: None,
                bias: None,
            };
            let call = self.attention.bind(device, &plan, io, &self.workspace).map_err(refused)?;
            append.encode(&mut pass);
            call.encode(&mut pass);
            self.dispatched = self.dispatched.wrapping_add(append.workgroups()).wrapping_add(call.workgroups());
            results.push([out, lse]);
        }
        Ok((chains, results))
    }

    /// One layer again, each sequence alone, with copies of its own pages among pages of NaN.
    pub fn record_shadows(
        &mut self,
        encoder: &mut wgpu::CommandEncoder,
        parts: &[Part],
        layer: u32,
    ) -> Result<([wgpu::Buffer; 2], Vec<[u64; 2]>), Noticed> {
        let (device, layout) = (&self.host.device, *self.store.layout());
        let kv = self.empty(shadow_bytes(&layout) * parts.len() as u64);
        encoder.copy_buffer_to_buffer(&self.poison, 0, &kv, 0, kv.size());
        let segments = self.store.pages(layer).map_err(refused)?;
        let segments: Vec<wgpu::Buffer> = segments.into_iter().map(|segment| segment.buffer.clone()).collect();
        for (base, part) in (0..).zip(parts).map(|(number, part)| (number * shadow_bytes(&layout), part)) {
            for page in &part.own {
                let at = u64::from(*page) * layout.page_bytes();
                let (segment, from) = layout.place_of(*page);
                encoder.copy_buffer_to_buffer(&segments[segment], from, &kv, base + at, layout.page_bytes());
            }
        }
        let aligned = |bytes: u64| bytes.next_multiple_of(256);
        let mut ends = [0, 0];
        let starts: Vec<[u64; 2]> = parts
            .iter()
            .map(|part| {
                let bytes = self.attention.config().buffer_bytes(part.q_len);
                let starts = ends;
                ends = [ends[0] + aligned(bytes.out), ends[1] + aligned(bytes.lse)];
                starts
            })
            .collect();
        let [out, lse] = ends.map(|size| self.empty(size));
        let mut pass = encoder.begin_compute_pass(&wgpu::ComputePassDescriptor::default());
        for (number, (part, starts)) in (0..).zip(parts.iter().zip(&starts)) {
            let rows = Rows::new([(part, part.q_len)].into_iter());
            let plan = self.attention.plan(&rows.batch()).map_err(refused)?;
            let plan = DevicePlan::upload(device, &plan).map_err(refused)?;
            let q = self.tensor(&part.last(part.q_len, layer, Kind::Q));
            let from = |buffer, offset| wgpu::BufferBinding { buffer, offset, size: None };
            let io = AttentionIo {
                q: q.as_entire_buffer_binding(),
                kv: vec![from(&kv, number * shadow_bytes(&layout))],
                out: from(&out, starts[0]),
                lse: from(&lse, starts[1]),
                heads: None,
                bias: None,
            };
            let call = self.attention.bind(device, &plan, io, &self.workspace).map_err(refused)?;
            call.encode(&mut pass);
            self.dispatched = self.dispatched.wrapping_add(call.workgroups());
        }
        drop(pass);
        Ok(([out, lse], starts))
    }

    pub fn read(&self, buffer: &wgpu::Buffer) -> Vec<f32> {
        self.host.read(buffer).chunks_exact(4).map(|word| f32::from_le_bytes(word.try_into().unwrap())).collect()
    }

    /// Judges all steps that were not looked at.
    pub fn look(&mut self) -> Result<(), Noticed> {
        self.host.status(&self.workspace).check(self.dispatched).map_err(refused)?;
        let spec = CaseSpec::new("api/isolation", HEADS, []).dtype(Dtype::F16).causal(true);
        let spec = spec.contiguous(Pool::new(PAGE_SIZE));
        for step in take(&mut self.steps) {
            for (layer, results) in (0..).zip(&step.results) {
                let what = format!("step {}, layer {layer}", step.number);
                let [out, lse] = results.each_ref().map(|buffer| self.read(buffer));
                let sequences: Vec<Sequence> = step.parts.iter().map(|part| part.sequence(layer)).collect();
                let case = assemble(&spec, &sequences).unwrap();
                let computed = Computed { out: &out, lse: &lse, out_dtype: Dtype::F32, chains: &step.chains };
                let report = verify(&case, &computed).map_err(|error| Noticed::Reference(error.to_string()))?;
                if !report.passed() {
                    return Err(Noticed::Reference(format!("{what}: {report}")));
                }
                self.worst = self.worst.max(report.max_bound_ratio);
                if layer == step.shadow_layer {
                    self.compare(&what, &step, [&out, &lse])?;
                }
                self.counts.checks += step.parts.len();
            }
        }
        Ok(())
    }

    pub fn compare(&self, what: &str, step: &Step, results: [&[f32]; 2]) -> Result<(), Noticed> {
        let shadows = step.shadows.each_ref().map(|buffer| self.read(buffer));
        let mut at = [0, 0];
        for (part, starts) in step.parts.iter().zip(&step.shadow_starts) {
            let rows = (part.q_len * HEADS.q_heads) as usize;
            let counts = [rows * HEADS.v_head_dim as usize, rows];
            for (i, tensor) in ["out", "lse"].into_iter().enumerate() {
                let start = starts[i] as usize / 4;
                let (own, shadow) = (&results[i][at[i]..][..counts[i]], &shadows[i][start..][..counts[i]]);
                if let Some(difference) = bits(tensor, own, shadow) {
                    return Err(Noticed::Shadow(format!("{what}, sequence {}: {difference}", part.id)));
                }
                at[i] += counts[i];
            }
        }
        Ok(())
    }
}
