// Asks Tint, the WGSL compiler of Chromium, whether browsers would take the kernels: it analyses uniformity, which naga
// does not, and pipelines are made against WebGPU's default limits. Dawn's null backend needs no driver.
//
// usage: node ci/tint.mjs FOLDER...    every *.wgsl in the folders; needs `npm install webgpu@0.6.2`
// Exit status 1 if a kernel was refused or if there was none.

import fs from 'node:fs';
import path from 'node:path';
import { create, globals } from 'webgpu';

Object.assign(globalThis, globals);

// Kept reachable to the end: Dawn goes as soon as this object is collected, and with it whatever still runs.
const gpu = create(['backend=null']);
globalThis.gpu = gpu;
const adapter = await gpu.requestAdapter();
const requiredFeatures = ['shader-f16', 'subgroups'].filter((feature) => adapter.features.has(feature));
const device = await adapter.requestDevice({ requiredFeatures });

// naga knows the subgroup functions without the directive and refuses it; Tint needs it. Directives come first.
function withDirectives(source) {
  const needed = /\bsubgroup[A-Z]\w*\s*\(|@builtin\(subgroup/.test(source) && !/^\s*enable\s+subgroups/m.test(source);
  return needed ? `enable subgroups;${source}` : source;
}

async function refusals(source) {
  device.pushErrorScope('validation');
  const module = device.createShaderModule({ code: withDirectives(source) });
  const { messages } = await module.getCompilationInfo();
  await device.popErrorScope();
  const errors = messages.filter((message) => message.type === 'error');
  if (errors.length > 0) {
    return errors.map((message) => `${message.lineNum}:${message.linePos} ${message.message}`);
  }
  const entryPoints = [...source.matchAll(/@compute\b[^{;]*?\bfn\s+(\w+)/g)].map((match) => match[1]);
  if (entryPoints.length === 0) {
    return ['no entry point found'];
  }
  const found = [];
  for (const entryPoint of entryPoints) {
    device.pushErrorScope('validation');
    device.createComputePipeline({ layout: 'auto', compute: { module, entryPoint } });
    const error = await device.popErrorScope();
    if (error) {
      found.push(`${entryPoint}: ${error.message}`);
    }
  }
  return found;
}

const files = process.argv.slice(2).flatMap((folder) =>
  fs.readdirSync(folder).filter((name) => name.endsWith('.wgsl')).sort().map((name) => path.join(folder, name)));
let refused = 0;
for (const file of files) {
  const reasons = await refusals(fs.readFileSync(file, 'utf8'));
  refused += reasons.length > 0;
  for (const reason of reasons) {
    console.log(`${file}: ${reason}`);
  }
}
console.log(`Tint: ${files.length - refused} kernels accepted, ${refused} refused`);
process.exit(refused > 0 || files.length === 0 ? 1 : 0);
