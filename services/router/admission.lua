-- Admission to one model's slots: one order for all routers. One call is one atomic step.
-- services/router/fair_order.py is the same order in Python; a test holds them equal.
--
-- Lanes (1 high, 2 normal, 3 low) come strictly one after the other; waiting `ageing` seconds lifts a
-- request by one lane. Within a lane tenants share by weight (start-time fair queuing): each grant
-- charges its tenant cost / weight of virtual time, and the tenant furthest behind is next; a
-- tenant's own requests go in order of arrival. Nothing is charged for waiting, so a cancelled
-- request leaves no trace. What the cost, an expectation, missed is settled when the request leaves.
--
-- The queue is bounded, and its places are shared too: in a full one, a tenant that has less than an
-- equal part of them takes the place of the last request of the tenant that has the most.
--
-- Keys, all below KEYS[1] (one hash slot):
--   :clock                   hash    virtual: the virtual time; gap, released: the drain rate
--   :finish                  zset    tenant -> virtual time up to which it was served, if ahead of the clock
--   :held                    zset    request -> its slot's lease, Unix seconds
--   :waiting                 zset    request -> its place's lease, Unix seconds
--   :tenants                 zset    tenant with waiting requests -> how many, over all lanes
--   :entries                 hash    waiting request -> {router, tenant, lane, work}
--   :lane:<n>                zset    tenant with waiting requests -> its virtual start
--   :line:<n>:<tenant>       zset    waiting request -> arrival, Unix seconds
--   :lift:<n>                zset    waiting request -> when it is lifted, Unix seconds
--
-- ARGV: op, router, capacity (slots), lease (s), ageing (s), then by op
--   enter   id, tenant, lane, work (cost / weight), waited (s), limit -> see `enter`
--   leave   (id, tenant, work missed)... -> granted
--   renew   count, held id..., waiting id... -> granted, unknown
--   status                         -> held, waiting
-- What becomes of the calling router's requests is returned, of others' published on
-- <KEYS[2]><router>, as JSON: ["granted", KEYS[1], id] or ["displaced", KEYS[1], id, advice].

local root, channel = KEYS[1], KEYS[2]
local op, router = ARGV[1], ARGV[2]
local capacity, lease, ageing = tonumber(ARGV[3]), tonumber(ARGV[4]), tonumber(ARGV[5])
local call = redis.call
local time = call('TIME')
local now = tonumber(time[1]) + tonumber(time[2]) / 1e6
local granted, displaced = {}, {}

local function key(name, a, b)
  local k = root .. ':' .. name
  if a then k = k .. ':' .. a end
  if b then k = k .. ':' .. b end
  return k
end

local function clock(field) return tonumber(call('HGET', key('clock'), field) or 0) end
local function size(k) return call('ZCARD', k) end

-- Virtual start of the tenant's next request.
local function start_of(tenant)
  return math.max(clock('virtual'), tonumber(call('ZSCORE', key('finish'), tenant) or 0))
end

local function count(tenant, change)
  if tonumber(call('ZINCRBY', key('tenants'), change, tenant)) <= 0 then
    call('ZREM', key('tenants'), tenant)
  end
end

local function put(id, entry, arrived, start)
  local lane = entry.lane
  local known = call('ZSCORE', key('lane', lane), entry.tenant)
  if not known or tonumber(known) > start then
    call('ZADD', key('lane', lane), start, entry.tenant)
  end
  call('ZADD', key('line', lane, entry.tenant), arrived, id)
  call('HSET', key('entries'), id, cjson.encode(entry))
  count(entry.tenant, 1)
end

-- Takes a waiting request out of its line; the others of its tenant stay as they are.
local function take(id, entry)
  local line = key('line', entry.lane, entry.tenant)
  local arrived = call('ZSCORE', line, id)
  call('ZREM', line, id)
  call('ZREM', key('lift', entry.lane), id)
  if size(line) == 0 then call('ZREM', key('lane', entry.lane), entry.tenant) end
  count(entry.tenant, -1)
  return tonumber(arrived)
end

local function entry_of(id)
  local raw = call('HGET', key('entries'), id)
  return raw and cjson.decode(raw)
end

local function forget(id)
  local entry = entry_of(id)
  if entry then
    take(id, entry)
    call('HDEL', key('entries'), id)
    call('ZREM', key('waiting'), id)
  end
  return entry
end

local function charge(tenant, start, work)
  local virtual = math.max(clock('virtual'), start)
  call('HSET', key('clock'), 'virtual', string.format('%.17g', virtual))
  call('ZADD', key('finish'), start + work, tenant)
  call('ZREMRANGEBYSCORE', key('finish'), '-inf', string.format('%.17g', virtual))
end

-- After a charge: the tenant's lanes go by its new start.
local function restart(tenant)
  for lane = 1, 3 do
    if call('ZSCORE', key('lane', lane), tenant) then
      call('ZADD', key('lane', lane), start_of(tenant), tenant)
    end
  end
end

-- Charges what a grant's work missed, or gives back (less than 0) as far as it is not past yet.
local function settle(tenant, missed)
  call('ZADD', key('finish'), start_of(tenant) + missed, tenant)
  call('ZREMRANGEBYSCORE', key('finish'), '-inf', string.format('%.17g', clock('virtual')))
  restart(tenant)
end

local function grant(id, tenant, start, work)
  charge(tenant, start, work)
  call('ZADD', key('held'), now + lease, id)
end

local function lift()
  for lane = 3, 2, -1 do
    for _, id in ipairs(call('ZRANGEBYSCORE', key('lift', lane), '-inf', now)) do
      local entry = entry_of(id)
      local start = tonumber(call('ZSCORE', key('lane', lane), entry.tenant))
      local arrived = take(id, entry)
      entry.lane = lane - 1
      entry.lifts = entry.lifts + 1
      put(id, entry, arrived, start)
      if entry.lane > 1 then
        call('ZADD', key('lift', entry.lane), arrived + ageing * (entry.lifts + 1), id)
      end
    end
  end
end

local function expire()
  call('ZREMRANGEBYSCORE', key('held'), '-inf', now)
  for _, id in ipairs(call('ZRANGEBYSCORE', key('waiting'), '-inf', now)) do forget(id) end
end

local function next_tenant()
  for lane = 1, 3 do
    local first = call('ZRANGE', key('lane', lane), 0, 0, 'WITHSCORES')
    if first[1] then return lane, first[1], tonumber(first[2]) end
  end
end

-- Tells a request's router what became of it: `list` is of those that the reply will name.
local function tell(list, what, id, entry, advice)
  if entry.router == router then
    list[#list + 1] = id
  else
    call('PUBLISH', channel .. entry.router, cjson.encode({what, root, id, advice}))
  end
end

-- Grants free slots in order.
local function pump()
  while size(key('held')) < capacity do
    local lane, tenant, start = next_tenant()
    if not lane then return end
    local id = call('ZRANGE', key('line', lane, tenant), 0, 0)[1]
    local entry = forget(id)
    grant(id, tenant, start, entry.work)
    restart(tenant)
    tell(granted, 'granted', id, entry)
  end
end

-- Frees a place in a full queue if the tenant, with one more, has no more than an equal part. Then
-- the one that has the most has at least two more than it had, so no two take turns at this.
local function displace(tenant, limit, advice)
  local own = tonumber(call('ZSCORE', key('tenants'), tenant) or 0)
  local tenants = size(key('tenants')) + (own == 0 and 1 or 0)
  if (own + 1) * tenants > limit then return false end
  local most = call('ZREVRANGE', key('tenants'), 0, 0)[1]
  for lane = 3, 1, -1 do
    local id = call('ZREVRANGE', key('line', lane, most), 0, 0)[1]
    if id then
      tell(displaced, 'displaced', id, forget(id), advice)
      return true
    end
  end
end

-- Returns {state, granted, requests that waited before it, advice, displaced}. The advice, in
-- seconds as a string, is for those that find no place: when one that came now would have its turn.
local function enter(id, tenant, lane, work, waited, limit)
  local waiting = size(key('waiting'))
  local advice = string.format('%.3f', clock('gap') * (waiting + 1))
  local function reply(state, before) return {state, granted, before, advice, displaced} end
  if call('ZSCORE', key('held'), id) then return reply('granted', 0) end
  if entry_of(id) then return reply('waiting', waiting) end
  if size(key('held')) < capacity then
    grant(id, tenant, start_of(tenant), work)
    return reply('granted', 0)
  end
  if waiting >= limit and not displace(tenant, limit, advice) then return reply('full', waiting) end
  local arrived = now - waited
  put(id, {router = router, tenant = tenant, lane = lane, work = work, lifts = 0}, arrived,
    start_of(tenant))
  call('ZADD', key('waiting'), now + lease, id)
  if lane > 1 then call('ZADD', key('lift', lane), arrived + ageing, id) end
  return reply('waiting', waiting)
end

-- The mean time between freed slots, taken only while somebody waits for them.
local function note_release()
  local gap, released = clock('gap'), clock('released')
  if size(key('waiting')) > 0 and released > 0 then
    local sample = math.min(now - released, 10)
    gap = gap > 0 and 0.9 * gap + 0.1 * sample or sample
    call('HSET', key('clock'), 'gap', string.format('%.17g', gap))
  end
  call('HSET', key('clock'), 'released', string.format('%.17g', now))
end

expire()
lift()
if op == 'enter' then
  pump()
  return enter(ARGV[6], ARGV[7], tonumber(ARGV[8]), tonumber(ARGV[9]), tonumber(ARGV[10]),
    tonumber(ARGV[11]))
end
if op == 'leave' then
  for i = 6, #ARGV, 3 do
    local id, tenant, missed = ARGV[i], ARGV[i + 1], tonumber(ARGV[i + 2])
    if not forget(id) and call('ZREM', key('held'), id) == 1 then
      if missed ~= 0 then settle(tenant, missed) end
      note_release()
    end
  end
  pump()
  return granted
end
if op == 'renew' then
  local unknown = {}
  local last_held = 6 + tonumber(ARGV[6])
  for i = 7, last_held do -- also those that Redis has lost: the router knows that they run
    forget(ARGV[i])
    call('ZADD', key('held'), now + lease, ARGV[i])
  end
  for i = last_held + 1, #ARGV do
    local id = ARGV[i]
    if call('ZSCORE', key('held'), id) then
      granted[#granted + 1] = id
    elseif call('ZADD', key('waiting'), 'XX', 'CH', now + lease, id) == 0
      and not call('ZSCORE', key('waiting'), id) then
      unknown[#unknown + 1] = id
    end
  end
  pump()
  return {granted, unknown}
end
if op == 'status' then
  pump()
  return {size(key('held')), size(key('waiting'))}
end
return redis.error_reply('unknown op ' .. op)
