'use strict';
// Elements as values, and numbers as text. All text from the coordinator becomes text nodes: there
// is no way from here into markup.

const SVG = 'http://www.w3.org/2000/svg';
const SVG_TAGS = new Set(['svg', 'g', 'path', 'line', 'rect', 'circle', 'text']);
const MOST_TEXT = 4000, SHORT_TEXT = 300;

// A description of an element. Children: descriptions, text, numbers; null and false are left out.
// Of the attributes, functions become listeners (onclick); undefined, null and false are left out.
function h(tag, attributes, ...children) {
  return {
    tag, attributes: attributes || {},
    children: children.flat(Infinity).filter((child) => child !== null && child !== undefined &&
                                             child !== false)
  };
}

// What others chose: isolated from the text around it, whatever its direction.
function foreign(text, attributes) {
  return h('bdi', attributes, shorten(String(text), MOST_TEXT));
}
function clipped(text) {
  return h('span', {class: 'clip', title: shorten(String(text), MOST_TEXT)}, foreign(text));
}
// Of any length, on few lines until the reader opens it.
function long(text) {
  return String(text).length <= SHORT_TEXT ? foreign(text)
    : h('details', {class: 'long'}, h('summary', null, foreign(text)));
}
function shorten(text, most) {
  return text.length > most ? text.slice(0, most) + '…' : text;
}

// Makes the children of `parent` those that `wanted` describes, and keeps what is the same, so that
// focus, scrolling, selection and open details stay.
function patch(parent, wanted) {
  wanted = [wanted].flat(Infinity).filter((child) => child !== null && child !== undefined &&
                                          child !== false);
  wanted.forEach((description, at) => {
    const node = parent.childNodes[at];
    if (typeof description !== 'object') {
      const text = String(description);
      if (node === undefined) parent.appendChild(document.createTextNode(text));
      else if (node.nodeType !== Node.TEXT_NODE) node.replaceWith(document.createTextNode(text));
      else if (node.nodeValue !== text) node.nodeValue = text;
      return;
    }
    const same = node !== undefined && node.nodeType === Node.ELEMENT_NODE &&
      node.localName === description.tag && node.key === description.attributes.key;
    const element = same ? node : make(description);
    if (!same && node === undefined) parent.appendChild(element);
    else if (!same) node.replaceWith(element);
    update(element, description);
  });
  while (parent.childNodes.length > wanted.length) parent.lastChild.remove();
}

function make(description) {
  const element = SVG_TAGS.has(description.tag)
    ? document.createElementNS(SVG, description.tag) : document.createElement(description.tag);
  element.key = description.attributes.key;
  return element;
}

function update(element, {attributes, children}) {
  const given = {};
  for (const [name, value] of Object.entries(attributes)) {
    if (name === 'key') continue;
    if (typeof value === 'function') element[name] = value;
    else if (value !== undefined && value !== null && value !== false) given[name] = String(value);
  }
  for (const {name} of [...element.attributes]) {
    // Whether details are open is the reader's choice.
    if (!(name in given) && name !== 'open') element.removeAttribute(name);
  }
  for (const [name, value] of Object.entries(given)) {
    if (element.getAttribute(name) !== value) element.setAttribute(name, value);
  }
  patch(element, children);
}

// A table that scrolls by itself where it is wider than the page. Columns: {head, number, roomy}.
function table(label, columns, rows) {
  const type = (column) =>
    [column.number && 'n', column.roomy && 'roomy', column.style].filter(Boolean).join(' ') || null;
  return h('div', {class: 'scroll', tabindex: 0, role: 'region', 'aria-label': label},
    h('table', null,
      h('thead', null, h('tr', null, columns.map((column) =>
        h('th', {scope: 'col', class: type(column)}, column.head)))),
      h('tbody', null, rows.map((row) => h('tr', {class: row.style, key: row.key},
        row.cells.map((cell, at) => at === 0
          ? h('th', {scope: 'row', class: type(columns[at])}, cell)
          : h('td', {class: type(columns[at])}, cell)))))));
}

// --- numbers as text ---
const NONE = '–';

// Protobuf's JSON has 64-bit integers and what is not finite as strings.
const number = (value) => value === undefined || value === null ? NaN : Number(value);
const whole = (value) => Number.isFinite(number(value))
  ? number(value).toLocaleString('en', {maximumFractionDigits: 0}) : NONE;

function compact(value) {
  value = number(value);
  if (!Number.isFinite(value)) return NONE;
  for (const [unit, size] of [['T', 1e12], ['G', 1e9], ['M', 1e6], ['k', 1e3]]) {
    if (value >= 10 * size || (value >= size && unit !== 'k')) {
      return (value / size).toPrecision(3) + ' ' + unit;
    }
  }
  return value >= 100 ? whole(value) : String(Number(value.toPrecision(3)));
}

function bytes(value) {
  value = number(value);
  if (!Number.isFinite(value)) return NONE;
  const units = ['B', 'KiB', 'MiB', 'GiB', 'TiB', 'PiB'];
  let unit = 0;
  while (value >= 1024 && unit < units.length - 1) {
    value /= 1024;
    ++unit;
  }
  return (unit === 0 ? value : value.toPrecision(value >= 1000 ? 4 : 3)) + ' ' + units[unit];
}

function loss(value) {
  value = number(value);
  if (Number.isNaN(value)) return NONE;
  if (!Number.isFinite(value)) return '∞';
  return Math.abs(value) >= 1e-3 && Math.abs(value) < 1e4 || value === 0
    ? value.toFixed(4) : value.toExponential(3);
}
const small = (value) => Number.isFinite(number(value))
  ? String(Number(number(value).toPrecision(4))) : NONE;

// Seconds as "2 h 5 min".
function span(seconds) {
  if (!Number.isFinite(seconds) || seconds < 0) return NONE;
  if (seconds < 1) return '<1 s';
  seconds = Math.round(seconds);
  if (seconds < 60) return seconds + ' s';
  if (seconds < 3600) return `${Math.floor(seconds / 60)} min ${seconds % 60} s`;
  if (seconds < 86400) {
    return `${Math.floor(seconds / 3600)} h ${Math.floor(seconds % 3600 / 60)} min`;
  }
  return `${Math.floor(seconds / 86400)} d ${Math.floor(seconds % 86400 / 3600)} h`;
}

function clock(unixMs) {
  const date = new Date(number(unixMs));
  if (!(number(unixMs) > 0) || Number.isNaN(date.getTime())) return NONE;
  const time = date.toLocaleTimeString('en-GB');
  return Date.now() - date.getTime() < 12 * 3600e3
    ? time : date.toLocaleDateString('en-CA') + ' ' + time.slice(0, 5);
}
