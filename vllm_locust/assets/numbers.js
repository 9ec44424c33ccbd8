"use strict";
// Numbers as text, and as the ends of axes.

const ABSENT = "–";
const UNITS_S = [[1, "s"], [1e-3, "ms"], [1e-6, "µs"]];
const FORMATS = Array.from({length: 7}, (_, digits) => new Intl.NumberFormat("en", {maximumFractionDigits: digits}));

function number(value, digits = 3) {
  if (value == null) return ABSENT;
  const magnitude = value === 0 ? 0 : Math.floor(Math.log10(Math.abs(value)));
  return FORMATS[Math.min(6, Math.max(0, digits - 1 - magnitude))].format(value);
}

function count(value) {
  return number(value, 15);
}

function unitOf(seconds) {
  return UNITS_S.find(([scale]) => seconds >= scale) ?? UNITS_S[2];
}

function duration(seconds) {
  if (seconds == null) return ABSENT;
  const [scale, unit] = seconds === 0 ? UNITS_S[1] : unitOf(seconds);
  return `${number(seconds / scale)} ${unit}`;
}

// 0:05, 12:30.5, 1:00:00
function clock(seconds) {
  const tenths = Math.round(seconds * 10), whole = Math.floor(tenths / 10);
  const [hours, minutes] = [Math.floor(whole / 3600), Math.floor(whole / 60) % 60];
  const two = (part) => String(part).padStart(2, "0");
  const rest = two(whole % 60) + (tenths % 10 ? `.${tenths % 10}` : "");
  return hours ? `${hours}:${two(minutes)}:${rest}` : `${minutes}:${rest}`;
}

// The smallest round number that is not below a value: an axis that ends there moves seldom.
function roundUp(value, steps = [1, 1.2, 1.5, 2, 2.5, 3, 4, 5, 6, 8, 10]) {
  const decade = 10 ** Math.floor(Math.log10(value));
  return decade * (steps.find((step) => step * decade >= value * (1 - 1e-9)) ?? 10);
}
