"""The status page: a few lines of HTML for a browser, without any data.

A browser that opens an address sends no token. So everybody gets this page, and it is
the same for all servers. Its script takes the token from the fragment of the address,
polls the same address as a program does, and shows what comes.
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Mapping
from typing import Final

_HTML: Final = "text/html"
_REFUSED: Final = re.compile(r"q=0(\.0*)?")

_STYLE: Final = """
body { font: 15px/1.5 system-ui, sans-serif; color: #1f2328; background: #f6f8fa;
  max-width: 62rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.3rem; margin: 0 0 1rem; }
#says { color: #9a3412; }
#says:empty, [hidden] { display: none; }
dl { display: grid; grid-template-columns: repeat(auto-fill, minmax(11rem, 1fr));
  gap: 1px; margin: 0 0 1.5rem; background: #d8dee4; border: 1px solid #d8dee4;
  border-radius: 6px; overflow: hidden; }
dl div { background: #fff; padding: .5rem .8rem; }
dt { color: #59636e; font-size: .8rem; }
dd { margin: 0; font-weight: 600; overflow-wrap: anywhere; }
table { width: 100%; border-collapse: collapse; background: #fff;
  border: 1px solid #d8dee4; }
th, td { padding: .4rem .8rem; text-align: left; border-bottom: 1px solid #e6eaee; }
th { color: #59636e; font-size: .8rem; font-weight: 500; }
td { font-variant-numeric: tabular-nums; overflow-wrap: anywhere; }
.number { text-align: right; white-space: nowrap; }
.bar { display: inline-block; vertical-align: middle; width: 9rem; height: .6rem;
  margin-right: .6rem; background: #e6eaee; border-radius: .3rem; overflow: hidden; }
.bar span { display: block; height: 100%; background: #2f6feb; }
.bar .whole { background: #2da44e; }
.has { white-space: nowrap; }
.bad { color: #b42318; font-weight: 600; }
"""

# Text gets into the page as textContent only, and the policy makes sure of it.
_SCRIPT: Final = """
'use strict';
const UNITS = ['B', 'kB', 'MB', 'GB', 'TB'];
const at = (id) => document.getElementById(id);
let before = null, round = 0;

function make(tag, text = '', kind = '') {
  const made = document.createElement(tag);
  made.textContent = text;
  made.className = kind;
  return made;
}

function bytes(count) {
  let unit = 0;
  for (; count >= 999.95 && unit < UNITS.length - 1; unit += 1) count /= 1000;
  return `${count.toFixed(unit ? 1 : 0)} ${UNITS[unit]}`;
}

function say(text) {
  at('says').textContent = text;
}

function clear() {
  before = null;
  at('facts').replaceChildren();
  at('members').hidden = true;
}

function fact(name, value) {
  const both = make('div');
  both.append(make('dt', name), make('dd', value));
  return both;
}

function row(member, chunks, rate) {
  const made = make('tr'), cell = make('td', '', 'has'), bar = make('div', '', 'bar');
  const share = Math.min(member.have / chunks, 1);
  const filled = make('span', '', share === 1 ? 'whole' : '');
  filled.style.width = `${100 * share}%`;
  bar.append(filled);
  cell.append(bar, `${Math.floor(100 * share)} %`);
  made.append(
    make('td', member.id), make('td', member.url), make('td', member.zone), cell,
    make('td', rate, 'number'),
    make('td', member.complaints, member.complaints ? 'number bad' : 'number'));
  return made;
}

function show({serving, status}) {
  const {swarm} = status, now = {time: performance.now(), sent: status.bytes_sent};
  now.snapshot = serving && serving.snapshot_id;
  now.have = new Map(swarm ? swarm.members.map((each) => [each.id, each.have]) : []);
  const seconds = before && (now.time - before.time) / 1000;
  const speed = (count) => (seconds ? `${bytes(Math.max(count, 0) / seconds)}/s` : '');
  const facts = serving ? [
    fact('step', serving.step), fact('size', bytes(serving.total_bytes)),
    fact('snapshot', serving.snapshot_id)] : [fact('step', 'none')];
  facts.push(
    fact('readers', status.readers), fact('waiting', status.waiting),
    fact('sent', bytes(status.bytes_sent)),
    fact('sending', before ? speed(now.sent - before.sent) : ''),
    fact('requests', `${status.requests}, ${status.refused} refused`));
  if (swarm) {
    facts.push(
      fact('chunks given once', `${swarm.given} of ${swarm.chunks}`),
      fact('members', now.have.size + (swarm.more || 0)));
  }
  at('facts').replaceChildren(...facts);
  const of = (each) => {
    const old = before && before.snapshot === now.snapshot && before.have.get(each.id);
    const size = serving.total_bytes / swarm.chunks;
    return typeof old === 'number' ? speed((each.have - old) * size) : '';
  };
  const rows = swarm ? swarm.members.map((each) => row(each, swarm.chunks, of(each)))
    : [];
  at('members').hidden = !rows.length;
  at('rows').replaceChildren(...rows);
  at('more').textContent = swarm && swarm.more ? `and ${swarm.more} more` : '';
  before = now;
}

async function poll() {
  const mine = round += 1, token = location.hash.slice(1);
  const headers = {Accept: 'application/json'};
  let pause = 1000;
  if (token) headers.Authorization = `Bearer ${token}`;
  try {
    const answer = await fetch(location.pathname,
      {headers, cache: 'no-store', signal: AbortSignal.timeout(10000)});
    const found = answer.ok ? await answer.json() : null;
    if (mine !== round) return;
    if (answer.status === 401) {
      clear();
      say(token ? 'The token in the address is not this server\\u2019s, or expired.'
        : 'This page needs the token: open the whole address, with # and the token.');
      return;
    }
    if (!found) throw new Error(`the server answered ${answer.status}`);
    show(found);
    say(found.serving ? '' : 'Nothing is served now.');
  } catch (error) {
    if (mine !== round) return;
    say(`No answer: ${error.message}. The page goes on trying.`);
    pause = 5000;
  }
  setTimeout(() => mine === round && poll(), pause);
}

addEventListener('hashchange', () => { clear(); poll(); });
poll();
"""

PAGE: Final = f"""\
<!DOCTYPE html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width">
<title>aiockpt</title>
<style>{_STYLE}</style>
<h1>aiockpt</h1>
<p id="says">This page needs JavaScript. Programs get the same as JSON.</p>
<dl id="facts"></dl>
<table id="members" hidden>
<thead><tr><th>member<th>address<th>zone<th>has<th class="number">receives<th
class="number">complaints</thead>
<tbody id="rows"></tbody>
</table>
<p id="more"></p>
<script>{_SCRIPT}</script>
""".encode()
"""The page; it says nothing of the server, nor of what it serves."""


def _source(text: str) -> str:
    found = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
    return f"'sha256-{found}'"


PAGE_HEADERS: Final[Mapping[str, str]] = {
    "Content-Type": f"{_HTML}; charset=utf-8",
    # Nothing may run, be loaded, be framed or be sent but what is in the page above.
    "Content-Security-Policy": (
        f"default-src 'none'; style-src {_source(_STYLE)}; "
        f"script-src {_source(_SCRIPT)}; connect-src 'self'; base-uri 'none'; "
        "form-action 'none'; frame-ancestors 'none'; "
        "require-trusted-types-for 'script'; trusted-types 'none'"
    ),
    "Referrer-Policy": "no-referrer",
    "Vary": "Accept",
}


def wants_page(accept: str) -> bool:
    """Return whether a request with this ``Accept`` is that of a browser."""
    for each in accept.lower().split(","):
        kind, *parameters = (part.strip() for part in each.split(";"))
        if kind == _HTML:
            return not any(_REFUSED.fullmatch(part) for part in parameters)
    return False
